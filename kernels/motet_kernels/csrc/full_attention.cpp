// Attention of every token of a sequence to all of them, as encoders have it.
//
// Both products are tiles of MAX_ROWS queries times panels of COLUMNS: keys, then values, which are packed once per head.
// The scores of a tile's rows stay in the second-level cache from the first key to the last, so that the softmax needs
// no second thoughts. A row's result depends neither on the other rows nor on the number of threads.
//
// Shapes: S tokens, H heads, D dim.
#include <cmath>

#include "integer.h"

namespace {

constexpr int COLUMNS = NV * W;
constexpr int64_t TILES = 8;  // that a thread takes at a time

struct Arguments {
    const void *query, *key, *value;  // [S, H, D] of float or, for pairs, bf16; strides in elements
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    int64_t tokens, heads, dim;
    float scale;
    void* out;  // [S, H, D], of the same type

    int64_t padded() const { return (tokens + COLUMNS - 1) / COLUMNS * COLUMNS; }
    int64_t panels() const { return (dim + COLUMNS - 1) / COLUMNS; }
};

// As they are: a step of a product takes in one number.
struct Exact {
    using Number = float;
    using Word = float;
    using Sum = vec;
    static constexpr int64_t PER_STEP = 1, FLUSH = INT64_MAX;
    INLINE Sum zero() { return vset(0.0f); }
    INLINE Sum load(const Word* p) { return vload(p); }
    INLINE Sum all(Word x) { return vset(x); }
    INLINE Sum add(Sum sum, Sum b, Sum a) { return fma(b, a, sum); }
    INLINE vec to_vec(Sum sum) { return sum; }
};

// In 16-bit steps: a step takes in two numbers, and sums are exact for FLUSH of them.
struct Rounded {
    using Number = float;
    using Word = int32_t;
    using Sum = word;
    static constexpr int64_t PER_STEP = 2, FLUSH = 32;
    static constexpr float MOST_WEIGHT = 32767.0f, MOST_VALUE = 1023.0f;  // 64 products of them fit into 31 bits
    INLINE Sum zero() { return wset(0); }
    INLINE Sum load(const Word* p) { return wload(p); }
    INLINE Sum all(Word x) { return wset(x); }
    INLINE Sum add(Sum sum, Sum b, Sum a) { return pairs(sum, b, a); }
    INLINE vec to_vec(Sum sum) { return to_float(sum); }
};

// bfloat16 numbers as they are, two to a step; weights are rounded to them.
struct Paired {
    using Number = bf16;
    using Word = int32_t;
    using Sum = vec;
    static constexpr int64_t PER_STEP = 2, FLUSH = INT64_MAX;
    INLINE Sum zero() { return vset(0.0f); }
    INLINE Sum load(const Word* p) { return vload(reinterpret_cast<const float*>(p)); }
    INLINE vec to_vec(Sum sum) { return sum; }
#if defined(__AVX512BF16__)
    INLINE Sum all(Word x) { return _mm512_castsi512_ps(_mm512_set1_epi32(x)); }
    INLINE Sum add(Sum sum, Sum b, Sum a) { return dot_pairs(sum, b, a); }
#endif
};

// out [MR][stride], COLUMNS of it: a [steps][MR] times b [steps][COLUMNS].
template <class Format, int MR>
void multiply(const typename Format::Word* b, const typename Format::Word* a, int64_t steps, float* out, int64_t stride) {
    for (int64_t begin = 0; begin < steps || begin == 0; begin += std::min(steps + 1, Format::FLUSH)) {
        typename Format::Sum sum[MR * NV];
        UNROLL for (int i = 0; i < MR * NV; i++) sum[i] = Format::zero();
        const int64_t count = std::min(steps - begin, Format::FLUSH);
        for (int64_t k = 0; k < count; k++, a += MR, b += COLUMNS) {
            typename Format::Sum column[NV];
            UNROLL for (int v = 0; v < NV; v++) column[v] = Format::load(b + v * W);
            UNROLL for (int m = 0; m < MR; m++) {
                typename Format::Sum x = Format::all(a[m]);
                PIN(x);
                UNROLL for (int v = 0; v < NV; v++) sum[m * NV + v] = Format::add(sum[m * NV + v], column[v], x);
            }
        }
        UNROLL for (int i = 0; i < MR * NV; i++) {
            float* to = out + i / NV * stride + i % NV * W;
            vec x = Format::to_vec(sum[i]);
            vstore(to, begin ? vload(to) + x : x);
        }
    }
}

template <class Format>
using Multiply = void (*)(const typename Format::Word*, const typename Format::Word*, int64_t, float*, int64_t);

template <class Format, int... I>
Multiply<Format> multiply_for(int rows, std::integer_sequence<int, I...>) {
    static constexpr Multiply<Format> tiles[] = {multiply<Format, I + 1>...};
    return tiles[rows - 1];
}

// The low halves of both.
int32_t joined(int32_t low, int32_t high) { return int32_t(uint32_t(low) << 16 >> 16 | uint32_t(high) << 16); }

// Adding 1.5 · 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
constexpr float ROUND = 12582912.0f;

INLINE int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

int32_t narrowed(float x) {
    bf16 narrow_x;
    narrow(x, &narrow_x);
    return narrow_x.bits;
}

// By what a number of which `largest` holds the bits is multiplied to become at most `most`, and the step; NaN if it is
// not finite.
float step_of(int32_t largest, float most, float* inverse) {
    float x;
    memcpy(&x, &largest, 4);
    const bool finite = largest < 0x7f800000;
    const float step = x / most;
    *inverse = finite && step >= 1.2e-38f ? 1.0f / step : 0.0f;
    return finite ? step : NAN;
}

// `count` numbers in integer steps of what is returned, none beyond `most`: they are the low halves of what is written.
float rounded(const float* from, int64_t count, float most, int32_t* to) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, bits_of(from[i]) & 0x7fffffff);
    float inverse;
    const float step = step_of(largest, most, &inverse);
    for (int64_t i = 0; i < count; i++) to[i] = bits_of(from[i] * inverse + ROUND);
    return step;
}

// One head: keys and values as panels, and what its rows become.
template <class Format>
struct Head {
    using Word = typename Format::Word;
    using Number = typename Format::Number;
    static constexpr bool EXACT = std::is_same_v<Format, Exact>, PAIRED = std::is_same_v<Format, Paired>;
    static constexpr bool ROUNDED = std::is_same_v<Format, Rounded>;
    const Arguments& a;
    int64_t head;
    char* memory;  // bytes() of it

    static int64_t key_steps(const Arguments& a) { return (a.dim + Format::PER_STEP - 1) / Format::PER_STEP; }
    static int64_t value_steps(const Arguments& a) { return (a.tokens + Format::PER_STEP - 1) / Format::PER_STEP; }
    static int64_t words(const Arguments& a) {
        return a.padded() * key_steps(a) + a.panels() * COLUMNS * value_steps(a) + a.padded() + a.panels() * COLUMNS;
    }
    Word* keys() const { return reinterpret_cast<Word*>(memory); }  // [panels of keys][steps][COLUMNS]
    Word* values() const { return keys() + a.padded() * key_steps(a); }  // [panels of D][steps][COLUMNS]
    float* key_scales() const {
        return reinterpret_cast<float*>(values() + a.panels() * COLUMNS * value_steps(a));
    }
    float* value_scales() const { return key_scales() + a.padded(); }
    // The largest query or key such that D products of two fit into 31 bits.
    float most() const { return std::min(32767.0f, std::floor(std::sqrt(2147483000.0f / float(a.dim)))); }

    void pack() const {
        memset(memory, 0, words(a) * 4);
        for (int64_t s = 0; s < a.tokens; s++) pack_key(s);
        if constexpr (EXACT)
            for (int64_t s = 0; s < a.tokens; s++)
                for (int64_t d = 0; d < a.dim; d++) *value_at(s, d) = value(s)[d];
        else
            pack_values();
    }

    static constexpr bool TILED = PAIRED && AMX;
    static constexpr int ROWS = TILED ? AMX_PAIR : MAX_ROWS;  // of a tile

    // Rows of the tiles first.. to last.
    void attend(const Tiles& tiles, int64_t first, int64_t last) const {
        for (int64_t t = first; t < last; t++) {
            if constexpr (TILED) attend_tiled(tiles.start(t), tiles.size(t));
            else attend(tiles.start(t), tiles.size(t));
        }
    }

  private:
    const Number* query(int64_t s) const {
        return static_cast<const Number*>(a.query) + s * a.query_token + head * a.query_head;
    }
    const Number* key(int64_t s) const {
        return static_cast<const Number*>(a.key) + s * a.key_token + head * a.key_head;
    }
    const Number* value(int64_t s) const {
        return static_cast<const Number*>(a.value) + s * a.value_token + head * a.value_head;
    }
    Word* value_at(int64_t s, int64_t d) const {
        return values() + (d / COLUMNS * value_steps(a) + s / Format::PER_STEP) * COLUMNS + d % COLUMNS;
    }

    void pack_key(int64_t s) const {
        const Number* from = key(s);
        Word* to = keys() + s / COLUMNS * COLUMNS * key_steps(a) + s % COLUMNS;
        if constexpr (EXACT) {
            for (int64_t d = 0; d < a.dim; d++) to[d * COLUMNS] = from[d];
        } else if constexpr (PAIRED) {
            for (int64_t k = 0; k < key_steps(a); k++) to[k * COLUMNS] = pair(from, k);
        } else {
            int32_t* line = integers.get<int32_t>(a.dim + 1);
            key_scales()[s] = rounded(from, a.dim, most(), line);
            line[a.dim] = 0;
            for (int64_t k = 0; k < key_steps(a); k++) to[k * COLUMNS] = joined(line[2 * k], line[2 * k + 1]);
        }
    }

    // Numbers 2k and 2k + 1 of a row.
    Word pair(const bf16* from, int64_t k) const {
        return joined(from[2 * k].bits, 2 * k + 1 < a.dim ? from[2 * k + 1].bits : 0);
    }

    void pack_values() const {
        if constexpr (PAIRED) {
            for (int64_t s = 0; s < a.tokens; s += 2)
                for (int64_t d = 0; d < a.dim; d++)
                    *value_at(s, d) = joined(value(s)[d].bits, s + 1 < a.tokens ? value(s + 1)[d].bits : 0);
        } else {
            pack_rounded_values();
        }
    }

    void pack_rounded_values() const {
        int32_t* largest = integers.get<int32_t>(2 * a.dim);
        float* inverse = reinterpret_cast<float*>(largest + a.dim);
        std::fill(largest, largest + a.dim, 0);
        for (int64_t s = 0; s < a.tokens; s++)
            for (int64_t d = 0; d < a.dim; d++) largest[d] = std::max(largest[d], bits_of(value(s)[d]) & 0x7fffffff);
        for (int64_t d = 0; d < a.dim; d++) value_scales()[d] = step_of(largest[d], Rounded::MOST_VALUE, inverse + d);
        for (int64_t s = 0; s < a.tokens; s += 2) {
            const Number *one = value(s), *other = s + 1 < a.tokens ? value(s + 1) : nullptr;
            for (int64_t d = 0; d < a.dim; d++) {
                const float next = other ? other[d] * inverse[d] : 0.0f;
                *value_at(s, d) = Word(joined(bits_of(one[d] * inverse[d] + ROUND), bits_of(next + ROUND)));
            }
        }
    }

    void attend(int64_t row, int rows) const {
        const int64_t padded = a.padded(), steps = value_steps(a);
        Word* query = queries.get<Word>(key_steps(a) * MAX_ROWS);
        Word* weights = weighed.get<Word>(steps * MAX_ROWS);
        float* scores = scored.get<float>(MAX_ROWS * padded);
        float scales[MAX_ROWS], sums[MAX_ROWS];
        for (int m = 0; m < rows; m++) scales[m] = pack_query(row + m, query + m, rows);
        auto tile = multiply_for<Format>(rows, std::make_integer_sequence<int, MAX_ROWS>());
        for (int64_t s = 0; s < padded; s += COLUMNS) tile(keys() + s * key_steps(a), query, key_steps(a), scores + s, padded);
        for (int m = 0; m < rows; m++) {
            sums[m] = soften(scores + m * padded, scales[m]);
            pack_weights(scores + m * padded, weights + m, rows);
        }
        alignas(64) float out[MAX_ROWS * COLUMNS];
        for (int64_t p = 0; p < a.panels(); p++) {
            tile(values() + p * steps * COLUMNS, weights, steps, out, COLUMNS);
            for (int m = 0; m < rows; m++) finish(out + m * COLUMNS, row + m, p * COLUMNS, 1.0f / sums[m]);
        }
    }

    // By AMX: keys and values lie in panels as it reads them.
    void attend_tiled(int64_t row, int rows) const {
        const int64_t padded = a.padded(), steps = value_steps(a);
        const int64_t query_bytes = amx_steps(key_steps(a)) * AMX_TILE, weight_bytes = amx_steps(steps) * AMX_TILE;
        char* query_tiles = queries.get<char>(2 * query_bytes);
        char* weight_tiles = weighed.get<char>(2 * weight_bytes);
        float* scores = scored.get<float>(ROWS * padded);
        float sums[ROWS];
        AmxFetch nothing{};
        const AmxTiles configured;
        auto panel = [&](const Word* words, int64_t count, const char* tiles, int64_t bytes, float* to, int64_t line) {
            amx_tiles<AmxPairs, 2>(reinterpret_cast<const char*>(words), count, tiles, bytes, nothing, to, line);
        };
        for (int m = 0; m < rows; m++)
            amx_pack_row(query(row + m), a.dim, query_tiles + m / AMX_ROWS * query_bytes + m % AMX_ROWS * 64);
        for (int64_t s = 0; s < padded; s += COLUMNS)
            panel(keys() + s * key_steps(a), key_steps(a), query_tiles, query_bytes, scores + s, padded);
        for (int m = 0; m < rows; m++) {
            sums[m] = soften(scores + m * padded, a.scale);
            amx_pack_row(scores + m * padded, a.tokens, weight_tiles + m / AMX_ROWS * weight_bytes + m % AMX_ROWS * 64);
        }
        alignas(64) float out[ROWS * COLUMNS];
        for (int64_t p = 0; p < a.panels(); p++) {
            panel(values() + p * steps * COLUMNS, steps, weight_tiles, weight_bytes, out, COLUMNS);
            for (int m = 0; m < rows; m++) finish(out + m * COLUMNS, row + m, p * COLUMNS, 1.0f / sums[m]);
        }
    }

    float pack_query(int64_t s, Word* to, int rows) const {
        const Number* from = query(s);
        if constexpr (PAIRED) {
            for (int64_t k = 0; k < key_steps(a); k++) to[k * rows] = pair(from, k);
            return a.scale;
        } else if constexpr (EXACT) {
            for (int64_t d = 0; d < a.dim; d++) to[d * rows] = from[d] * a.scale;
            return 1.0f;
        } else {
            int32_t* line = integers.get<int32_t>(a.dim + 1);
            const float scale = rounded(from, a.dim, most(), line);
            line[a.dim] = 0;
            for (int64_t k = 0; k < key_steps(a); k++) to[k * rows] = joined(line[2 * k], line[2 * k + 1]);
            return scale * a.scale;
        }
    }

    // Scores to weights, the largest of them 1 (or MOST_WEIGHT steps, the low halves of what is written); their sum.
    float soften(float* scores, float scale) const {
        const int64_t tokens = a.tokens, whole = tokens / W * W;
        const float *by_key = key_scales();
        vec best = vset(-INFINITY), nan = vset(0.0f);
        for (int64_t s = 0; s < tokens; s += W) {
            vec x = vload(scores + s);
            if constexpr (PAIRED) x = x * vset(scale);
            if constexpr (ROUNDED) x = x * vload(by_key + s) * vset(scale);
            nan = nan + x * vset(0.0f);  // the largest may pass over a NaN
            vstore(scores + s, x);
            best = vmax(best, s < whole ? x : vkeep(x, 0, int(tokens - whole), vset(-INFINITY)));
        }
        const vec largest = vset(vmax_lanes(best));
        vec sum = nan;
        for (int64_t s = 0; s < tokens; s += W) {
            vec x = vexp(vload(scores + s) - largest);
            if (s >= whole) x = vkeep(x, 0, int(tokens - whole), vset(0.0f));
            if constexpr (ROUNDED) {
                vec steps = fma(x, vset(Rounded::MOST_WEIGHT), vset(ROUND));
                x = steps - vset(ROUND);
                vstore(scores + s, steps);
            } else {
                vstore(scores + s, x);
            }
            sum = sum + x;
        }
        return vsum_lanes(sum);
    }

    void pack_weights(const float* scores, Word* to, int rows) const {
        for (int64_t k = 0; k < value_steps(a); k++) {
            if constexpr (EXACT)
                to[k * rows] = scores[k];
            else if constexpr (PAIRED)
                to[k * rows] = joined(narrowed(scores[2 * k]), narrowed(scores[2 * k + 1]));
            else
                to[k * rows] = joined(bits_of(scores[2 * k]), bits_of(scores[2 * k + 1]));
        }
    }

    void finish(const float* from, int64_t row, int64_t column, float factor) const {
        Number* to = static_cast<Number*>(a.out) + (row * a.heads + head) * a.dim + column;
        for (int64_t d = 0; d < std::min<int64_t>(COLUMNS, a.dim - column); d++)
            narrow(from[d] * (ROUNDED ? factor * value_scales()[column + d] : factor), to + d);
    }

    static inline thread_local Scratch integers, queries, weighed, scored;
};

template <class Format>
void run(const Arguments& a) {
    static thread_local Scratch scratch;
    const int64_t size = (Head<Format>::words(a) * 4 + 63) / 64 * 64;
    char* memory = scratch.get<char>(size * a.heads);
    const Tiles tiles(a.tokens, Head<Format>::ROWS);
    const int64_t groups = (tiles.count + TILES - 1) / TILES;
    const int threads = threads_for(a.tokens * a.tokens * a.heads * a.dim, groups * a.heads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t h = 0; h < a.heads; h++) Head<Format>{a, h, memory + h * size}.pack();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < groups * a.heads; i++) {
            const int64_t h = i / groups, first = i % groups * TILES;
            Head<Format>{a, h, memory + h * size}.attend(tiles, first, std::min(first + TILES, tiles.count));
        }
    }
}

}  // namespace

// Kind 0 is exact and 1 rounded, of float32; 2 is of bfloat16, where there are instructions for it.
EXPORT int64_t motet_full_attention(const void* query, int64_t query_token, int64_t query_head, const void* key,
                                    int64_t key_token, int64_t key_head, const void* value, int64_t value_token,
                                    int64_t value_head, void* out, int64_t tokens, int64_t heads, int64_t dim,
                                    float scale, int64_t kind) {
    const Arguments a{query, key, value, query_token, query_head, key_token, key_head, value_token, value_head,
                      tokens, heads, dim, scale, out};
    if (tokens <= 0) return 0;
#if defined(__AVX512BF16__)
    if (kind == 2) {
        run<Paired>(a);
        return 0;
    }
#endif
    kind == 1 ? run<Rounded>(a) : run<Exact>(a);
    return 0;
}
