// The inner loops of attention: scores, softmax and weighted values of one block of keys.
//
// A line is a query token and a head; a register tile takes NL lines at once. How lines and keys are put into tiles
// never shows in the result: see attention.cpp.
//
// Loops over float32 queries and weights read keys and values of any type. Those over bfloat16 ones (PAIRED) read bfloat16
// keys and values, in dot products of two: of two columns for scores, of two keys for values.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd.h"

constexpr int KEYS = 64;  // of a block
// Accumulators of a tile of values, by the number of vector registers.
constexpr int ACCUMULATORS = W == 16 ? 16 : 8;

// Of the keys of a block, those that a line sees.
struct Range {
    int from, to;
    bool empty() const { return from >= to; }
};

// Into the second-level cache: the first one is no larger than the keys and values of a block.
INLINE void prefetch(const char* at, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 0, 2);
}

// The k-th row of a block to fetch: a core reads faster from several places than from one.
INLINE int spread(int k) { return k % 4 * (KEYS / 4) + k / 4; }

#if defined(__AVX512BF16__)
constexpr bool PAIRED = true;
INLINE vec load_pairs(const bf16* p) { return vload(reinterpret_cast<const float*>(p)); }
// Numbers of two rows side by side: of the low and of the high halves of their 128-bit parts.
INLINE vec low_pairs(vec even, vec odd) {
    return _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_castps_si512(even), _mm512_castps_si512(odd)));
}
INLINE vec high_pairs(vec even, vec odd) {
    return _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_castps_si512(even), _mm512_castps_si512(odd)));
}
#else
constexpr bool PAIRED = false;
#endif
constexpr int PAIRS = 2 * W;  // bfloat16 numbers of a vector

// How queries of a type are multiplied by keys: STEP numbers at a time.
template <typename Query>
struct Scores {
    static constexpr int STEP = W;
    template <typename T>
    INLINE vec load(const T* p) { return vload(p); }
    INLINE vec add(vec sum, vec q, vec key) { return fma(q, key, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Scores<bf16> {
    static constexpr int STEP = PAIRS;
    INLINE vec load(const bf16* p) { return load_pairs(p); }
    INLINE vec add(vec sum, vec q, vec key) { return dot_pairs(sum, q, key); }
};
#endif

// Scores of NL lines and W / NL keys. A sum runs over D in lanes, then over the lanes.
template <int NL, typename Query, typename T>
void score_tile(const Query* query, int64_t dim, const T* const* keys, float scale, float* scores) {
    using Format = Scores<Query>;
    constexpr int NK = W / NL;
    vec sums[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sums[i] = vset(0.0f);
    for (int64_t d = 0; d < dim; d += Format::STEP) {
        vec q[NL];
#pragma GCC unroll 16
        for (int l = 0; l < NL; l++) q[l] = Format::load(query + l * dim + d);
#pragma GCC unroll 16
        for (int k = 0; k < NK; k++) {
            vec key = Format::load(keys[k] + d);
#pragma GCC unroll 16
            for (int l = 0; l < NL; l++) sums[l * NK + k] = Format::add(sums[l * NK + k], q[l], key);
        }
    }
    float tile[W];
    vstore(tile, vsum_each(sums) * vset(scale));
#pragma GCC unroll 16
    for (int l = 0; l < NL; l++) memcpy(scores + l * KEYS, tile + l * NK, NK * sizeof(float));
}

// Scores of NL lines with the keys that any of them sees, while the values of these keys are on their way.
template <int NL, typename Query, typename T>
void score_lines(const Query* query, int64_t dim, const T* const* keys, const Range* seen, float scale, float* scores,
                 const char* const* values, int64_t value_bytes) {
    constexpr int NK = W / NL;
    int from = KEYS, to = 0;
    for (int l = 0; l < NL; l++) {
        if (seen[l].empty()) continue;
        from = std::min(from, seen[l].from), to = std::max(to, seen[l].to);
    }
    for (int k = from / NK * NK; k < to; k += NK) {
        for (int i = 0; i < NK; i++) prefetch(values[spread(k + i)], value_bytes);
        score_tile<NL>(query, dim, keys + k, scale, scores + k);
    }
}

// What a line sees of a vector of keys from k on, `other` elsewhere.
INLINE vec keep_seen(vec x, Range seen, int k, vec other) {
    return seen.from <= k && k + W <= seen.to ? x : vkeep(x, seen.from - k, seen.to - k, other);
}

// The largest score that a line sees, scores soft-capped first.
INLINE float cap_and_max(float* scores, Range seen, float softcap) {
    vec best = vset(-INFINITY);
    for (int k = seen.from / W * W; k < seen.to; k += W) {
        vec x = vload(scores + k);
        if (softcap > 0) {
            x = vtanh(x / vset(softcap)) * vset(softcap);
            vstore(scores + k, x);
        }
        best = vmax(best, keep_seen(x, seen, k, vset(-INFINITY)));
    }
    return vmax_lanes(best);
}

// Scores to weights, e^(score - max); returns their sum.
INLINE float weigh(float* scores, Range seen, float max) {
    vec sum = vset(0.0f);
    for (int k = seen.from / W * W; k < seen.to; k += W) {
        vec weight = keep_seen(vexp(vload(scores + k) - vset(max)), seen, k, vset(0.0f));
        vstore(scores + k, weight);
        sum = sum + weight;
    }
    return vsum_lanes(sum);
}

#if defined(__AVX512BF16__)
// Weights that a line sees, in place to bfloat16.
INLINE void narrow_weights(float* scores, Range seen) {
    bf16* to = reinterpret_cast<bf16*>(scores);
    for (int k = seen.from / W * W; k < seen.to; k += W) vstore_operand(to + k, vload(scores + k));
}
#else
INLINE void narrow_weights(float*, Range) {}
#endif

// NV vectors of NL accumulators: decayed, then each line's weighted values added key by key. Keys that all lines see
// are taken together, those before and after line by line.
template <int NL, int NV, typename T>
void value_tile(float* out, int64_t dim, const float* decay, const float* weights, const Range* seen,
                const T* const* values, int64_t column, const char* const* next, int64_t next_bytes) {
    vec sums[NL][NV];
#pragma GCC unroll 16
    for (int l = 0; l < NL; l++)
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) sums[l][v] = vload(out + l * dim + column + v * W) * vset(decay[l]);
    auto add = [&](int l, int from, int to) __attribute__((always_inline)) {
        for (int k = from; k < to; k++) {
            vec weight = vset(weights[l * KEYS + k]);
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) sums[l][v] = fma(weight, vload(values[k] + column + v * W), sums[l][v]);
        }
    };
    int from = seen[0].from, to = seen[0].to;
    for (int l = 1; l < NL; l++) from = std::max(from, seen[l].from), to = std::min(to, seen[l].to);
    if (from >= to) from = to = KEYS;
#pragma GCC unroll 16
    for (int l = 0; l < NL; l++) add(l, seen[l].from, std::min(from, seen[l].to));
    for (int k = from; k < to; k++) {
        prefetch(next[spread(k)], next_bytes);
        vec value[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) value[v] = vload(values[k] + column + v * W);
#pragma GCC unroll 16
        for (int l = 0; l < NL; l++) {
            vec weight = vset(weights[l * KEYS + k]);
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) sums[l][v] = fma(weight, value[v], sums[l][v]);
        }
    }
#pragma GCC unroll 16
    for (int l = 0; l < NL; l++) {
        add(l, to, seen[l].to);
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) vstore(out + l * dim + column + v * W, sums[l][v]);
    }
}

#if defined(__AVX512BF16__)
// As above, two keys at a time, from an even one on: of two of which a line sees one, the other counts as zero. Two
// vectors of accumulators hold 2 · W columns, fours of them in turn (see `unpair`). Weights are those of narrow_weights().
template <int NL, int NV>
void value_tile(float* out, int64_t dim, const float* decay, const bf16* weights, const Range* seen,
                const bf16* const* values, int64_t column, const char* const* next, int64_t next_bytes) {
    static_assert(NV % 2 == 0);
    vec sums[NL][NV];
#pragma GCC unroll 16
    for (int l = 0; l < NL; l++)
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) sums[l][v] = vload(out + l * dim + column + v * W) * vset(decay[l]);
    auto weight_of = [&](int l, int k) __attribute__((always_inline)) {
        int32_t two;
        memcpy(&two, weights + l * 2 * KEYS + k, sizeof two);
        return _mm512_castsi512_ps(_mm512_set1_epi32(two));
    };
    auto add = [&](int l, int from, int to) __attribute__((always_inline)) {
        for (int k = from / 2 * 2; k < to; k += 2) {
            const bool first = k >= from, second = k + 1 < to;
            const int32_t counted = (first ? 0xffff : 0) | (second ? int32_t(0xffff0000) : 0);
            vec weight = _mm512_and_ps(weight_of(l, k), _mm512_castsi512_ps(_mm512_set1_epi32(counted)));
#pragma GCC unroll 16
            for (int v = 0; v < NV; v += 2) {
                vec even = first ? load_pairs(values[k] + column + v * W) : vset(0.0f);
                vec odd = second ? load_pairs(values[k + 1] + column + v * W) : vset(0.0f);
                sums[l][v] = dot_pairs(sums[l][v], weight, low_pairs(even, odd));
                sums[l][v + 1] = dot_pairs(sums[l][v + 1], weight, high_pairs(even, odd));
            }
        }
    };
    int from = seen[0].from, to = seen[0].to;
    for (int l = 1; l < NL; l++) from = std::max(from, seen[l].from), to = std::min(to, seen[l].to);
    from = (from + 1) / 2 * 2, to = to / 2 * 2;
    if (from >= to) from = to = KEYS;
#pragma GCC unroll 16
    for (int l = 0; l < NL; l++) add(l, seen[l].from, std::min(from, seen[l].to));
    for (int k = from; k < to; k += 2) {
        prefetch(next[spread(k)], next_bytes);
        prefetch(next[spread(k + 1)], next_bytes);
        vec value[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v += 2) {
            vec even = load_pairs(values[k] + column + v * W), odd = load_pairs(values[k + 1] + column + v * W);
            value[v] = low_pairs(even, odd), value[v + 1] = high_pairs(even, odd);
        }
#pragma GCC unroll 16
        for (int l = 0; l < NL; l++) {
            vec weight = weight_of(l, k);
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) sums[l][v] = dot_pairs(sums[l][v], weight, value[v]);
        }
    }
#pragma GCC unroll 16
    for (int l = 0; l < NL; l++) {
        add(l, to, seen[l].to);
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) vstore(out + l * dim + column + v * W, sums[l][v]);
    }
}

// Put the columns of accumulators of pairs in order, in place. dim: a multiple of 2 · W.
INLINE void unpair(float* out, int64_t dim) {
    for (int64_t d = 0; d < dim; d += PAIRS) {
        vec low = vload(out + d), high = vload(out + d + W);
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        vstore(out + d, _mm512_permutex2var_ps(low, first, high));
        vstore(out + d + W, _mm512_permutex2var_ps(low, second, high));
    }
}
#else
INLINE void unpair(float*, int64_t) {}
#endif

// All columns from `column` on, the next block's keys on their way with the first of them.
template <int NL, int NV = std::min(8, ACCUMULATORS / NL), typename Weight, typename T>
void value_lines(float* out, int64_t dim, const float* decay, const Weight* weights, const Range* seen,
                 const T* const* values, int64_t column, const char* const* next, int64_t next_bytes) {
    for (; column + NV * W <= dim; column += NV * W, next_bytes = 0)
        value_tile<NL, NV>(out, dim, decay, weights, seen, values, column, next, next_bytes);
    if constexpr (NV > (std::is_same_v<Weight, bf16> ? 2 : 1))
        value_lines<NL, NV / 2>(out, dim, decay, weights, seen, values, column, next, next_bytes);
}
