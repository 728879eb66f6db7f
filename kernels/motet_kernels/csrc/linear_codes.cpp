// x · Wᵀ for weights in codes of 2, 4 or 8 bits, as ready-made checkpoints have them: the input is rounded to integers of 8
// or 16 bits, with a scale for each 32 numbers of a row; products are summed exactly in int32.
//
// A weight is scale · (level - offset) + shift. Scale and shift belong to one output and a group of inputs, of 16 or of a
// multiple of 32. The level of a code is the code itself, or what a table of 16 says: integers of 8 or 16 bits, in units
// of `unit`.
//
// Packed, per panel of 32 columns and group of 32 inputs: codes of 4 bits as in linear_integer.cpp, without its scales,
// in 512 bytes; codes of 2 bits as [2][32][4] bytes, whose lowest bits are of k = 4t + i, the next of k = 8 + 4t + i; codes of
// 8 bits plus 128 as [8][32][4] bytes. Scales and shifts [N/32][groups][32] in one of the types of
// `Numbers`. K is padded with inputs of zero.
//
// Groups are added up from the first to the last: a row has the same bits in every batch.
#include "integer.h"
#include "numbers.h"
#include "replay.h"

namespace {

constexpr int64_t GROUP = 32;
constexpr int WORDS = 8, WORDS_OF_HALF = 4;  // words of four inputs in a group

struct Pair {
    word even, odd;
};

// What a row has at a word of codes: its four bytes everywhere, as one word or as a pair of words.
struct Whole {
    static constexpr int WORDS = 1;
    using Input = word;
    INLINE Input input(const int32_t* x, int) {
        word wide = wset(*x);
        PIN(wide);
        return wide;
    }
};

struct Halved {
    static constexpr int WORDS = 2;
    using Input = Pair;
    INLINE Input input(const int32_t* x, int rows) {
        word first = wset(x[0]), second = wset(x[rows]);
        PIN(first);
        PIN(second);
        return {first, second};
    }
    INLINE word add(word sum, Pair w, Pair x) { return pairs(pairs(sum, w.even, x.even), w.odd, x.odd); }
};

// ------------------------------------------------------------------------------------------------------------- codes
// STEP: bytes of a panel's group. TOP: the largest input, so that no sum overflows. HALVES: whether each half of a group
// has numbers of its own. SPLIT: whether the sums of a half must be taken before the next, to fit. SUMS16: whether a
// word sums in two lanes of 16 bits. ROWS: of a tile.

// Codes of 4 bits that are their own levels, 0 to 15, times bytes.
template <bool H>
struct Nibbles : Whole {
    static constexpr int64_t STEP = 512;
    static constexpr int TOP = 127, ROWS = W == 16 ? 6 : H ? 4 : 3;
    static constexpr bool HALVES = H, SPLIT = false, SUMS16 = GATHERS16;
    using Weights = word;
    INLINE Weights load(const uint8_t* at, const int8_t*, int k, bool second) {
        const word both = wload(at + k * PANEL * 4);
        return second ? high_nibbles(both) : low_nibbles(both);
    }
    INLINE word add(word sum, Weights w, Input x) { return gather(sum, w, x); }
    INLINE word done(word sum) { return gathered(sum); }
};

// Codes of 2 bits.
template <bool H>
struct Crumbs : Nibbles<H> {
    static constexpr int64_t STEP = 256;
    INLINE word load(const uint8_t* at, const int8_t*, int k, bool second) {
        return crumbs(wload(at + k % 2 * PANEL * 4), 2 * second + k / 2);
    }
};

// The same with a table of levels from 0 to 32.
template <bool H>
struct LowTable : Nibbles<H> {
    static constexpr int ROWS = W == 16 ? 6 : 4;
    static constexpr bool SPLIT = GATHERS16;  // 4 · 2 · 32 · 127 fits into 16 bits
    INLINE word load(const uint8_t* at, const int8_t* table, int k, bool second) {
        return lookup(table, Nibbles<H>::load(at, table, k, second));
    }
};

// Bytes, or what is looked up or taken as a byte, times 16 bits.
template <bool H>
struct Bytes : Halved {
    static constexpr int64_t STEP = 1024;
    static constexpr int TOP = 32767, ROWS = W == 16 ? 6 : 4;
    static constexpr bool HALVES = H, SPLIT = false, SUMS16 = false;
    using Weights = Pair;
    INLINE Weights load(const uint8_t* at, const int8_t*, int k, bool second) {
        return wide(wload(at + (k + second * WORDS_OF_HALF) * PANEL * 4));
    }
    INLINE word done(word sum) { return sum; }

  protected:
    INLINE Weights wide(word w) { return {even(w), odd(w)}; }
};

template <bool H>
struct WideNibbles : Bytes<H> {
    static constexpr int64_t STEP = 512;
    INLINE Pair load(const uint8_t* at, const int8_t* table, int k, bool second) {
        return Bytes<H>::wide(Nibbles<H>::load(at, table, k, second));
    }
};

template <bool H>
struct WideCrumbs : Bytes<H> {
    static constexpr int64_t STEP = 256;
    INLINE Pair load(const uint8_t* at, const int8_t* table, int k, bool second) {
        return Bytes<H>::wide(Crumbs<H>::load(at, table, k, second));
    }
};

template <bool H>
struct ByteTable : Bytes<H> {
    static constexpr int64_t STEP = 512;
    INLINE Pair load(const uint8_t* at, const int8_t* table, int k, bool second) {
        return Bytes<H>::wide(lookup(table, Nibbles<H>::load(at, table, k, second)));
    }
};

// Bytes, or what is looked up as a byte, times bytes; without a dot product of bytes, times bytes in 16 bits.
#if defined(__AVX512VNNI__) || !defined(__AVX2__)
template <bool H>
struct ShortBytes : Whole {
    static constexpr int64_t STEP = 1024;
    static constexpr int TOP = 127, ROWS = W == 16 ? 8 : 4;
    static constexpr bool HALVES = H, SPLIT = false, SUMS16 = false;
    using Weights = word;
    INLINE Weights load(const uint8_t* at, const int8_t*, int k, bool second) {
        return wload(at + (k + second * WORDS_OF_HALF) * PANEL * 4);
    }
    INLINE word add(word sum, Weights w, Input x) { return dot(sum, w, x); }
    INLINE word done(word sum) { return sum; }
};

template <bool H>
struct ShortTable : ShortBytes<H> {
    static constexpr int64_t STEP = 512;
    INLINE word load(const uint8_t* at, const int8_t* table, int k, bool second) {
        return lookup(table, Nibbles<H>::load(at, table, k, second));
    }
};
#else
template <bool H>
struct ShortBytes : Bytes<H> {
    static constexpr int TOP = 127;
};

template <bool H>
struct ShortTable : ByteTable<H> {
    static constexpr int TOP = 127;
};
#endif

// Codes of 4 bits whose levels are integers from -8191 to 8191: the table has their low bytes, then their high ones.
struct WideTable : Halved {
    static constexpr int64_t STEP = 512;
    static constexpr int TOP = 8191, ROWS = W == 16 ? 6 : 4;
    static constexpr bool HALVES = false, SPLIT = false, SUMS16 = false;
    using Weights = Pair;
    INLINE Weights load(const uint8_t* at, const int8_t* table, int k, bool second) {
        const word code = Nibbles<false>::load(at, table, k, second);
        const word low = lookup(table, code), high = lookup(table + 16, code);
        return {wor(even(low), wshift_up(even(high))), wor(odd(low), wshift_up(odd(high)))};
    }
    INLINE word done(word sum) { return sum; }
};

// ----------------------------------------------------------------------------------------------------------- product
struct CodesProduct : Product {
    const uint8_t* weights;
    int64_t first_panel;  // of the scales and shifts that belong to these weights
    const int8_t* table;
    Numbers scales, shifts;
    const int32_t* order;  // which input stands where, or null
    int64_t group;         // inputs per scale
    int32_t offset;
    float unit;
    int64_t groups;        // of 32 inputs
    int words;             // of input per word of codes
    float top;             // what the largest input of a group becomes
    bool apart, lanes;     // whether halves of a group are summed apart; whether a word sums in two lanes
    // The quantized input, by tiles: [groups][8][words][rows] and [groups][rows] scales; [groups][2][rows] words that sums of
    // halves begin with, which take the offset off the levels, and sums of inputs times their scale. Where halves are not
    // apart, the first ones are of the group.
    int32_t* packed;
    float* row_scales;
    int32_t* row_begins;
    float* row_sums;
    Tiles tiles{0, 1};

    template <typename T>
    void pack(int64_t tile) const {
        const int64_t row = tiles.start(tile);
        const int rows = tiles.size(tile);
        T* sorted = order ? sorted_line.get<T>(K) : nullptr;
        for (int m = 0; m < rows; m++) {
            const T* from = static_cast<const T*>(input) + (row + m) * input_stride;
            if (order) {
                for (int64_t k = 0; k < K; k++) sorted[k] = from[order[k]];
                from = sorted;
            }
            for (int64_t g = 0; g < groups; g++) {
                alignas(64) int32_t level[GROUP] = {};
                const int64_t begin = g * GROUP, at = (row * groups + g * rows) + m;
                int32_t sum;
                const float scale = begin + GROUP <= K ? quantize(from + begin, constant<GROUP>(), top, level, &sum)
                                                       : quantize(from + begin, K - begin, top, level, &sum);
                row_scales[at] = scale * unit;
                int32_t half = 0;
                for (int i = 0; i < GROUP / 2; i++) half += level[i];
                const int32_t first = apart ? half : sum, second = apart ? sum - half : 0;
                const int64_t to = 2 * (row * groups + g * rows) + m;
                row_begins[to] = beginning(first), row_begins[to + rows] = beginning(second);
                row_sums[to] = row_scales[at] * float(first), row_sums[to + rows] = row_scales[at] * float(second);
                spread(level, packed + (row * groups + g * rows) * WORDS * words + m, rows);
            }
        }
    }

    void pack(int64_t tile) const { input_bf16 ? pack<bf16>(tile) : pack<float>(tile); }

    template <class Codes>
    void compute(int64_t start, int64_t end) const {
        alignas(64) float out[MAX_TILE * PANEL];
        if (M == 1) {
            for (int64_t panel = start; panel < end; panel++) {
                for (int part = 0; part < PARTS; part++)
                    shifts.fine ? line<Codes, true>(panel, part, out) : line<Codes, false>(panel, part, out);
                finish(out, 0, 1, panel * PANEL);
            }
            return;
        }
        const int64_t numbers = numbers_of_panel();
        float* decoded = panel_numbers.get<float>((shifts.fine ? 2 : 1) * numbers);
        for (int64_t panel = start; panel < end; panel++) {
            decode(scales, panel, decoded);
            if (shifts.fine) decode(shifts, panel, decoded + numbers);
            for (int64_t t = 0; t < tiles.count; t++) {
                const int rows = tiles.size(t);
                const auto up_to = std::make_integer_sequence<int, Codes::ROWS>();
                auto tile = shifts.fine ? tile_for<Codes, true>(rows, up_to) : tile_for<Codes, false>(rows, up_to);
                const bool next = t == 0 && panel + 1 < end;
                for (int part = 0; part < PARTS; part++) tile(*this, panel, part, tiles.start(t), next, decoded, out);
                finish(out, tiles.start(t), rows, panel * PANEL);
            }
        }
    }

    static constexpr int MAX_TILE = W == 16 ? 8 : 6;
    static constexpr int64_t FAR = 4096, NEAR = 1024;  // bytes ahead that one row fetches into the second and the first cache
    static thread_local Scratch packed_words, packed_scales, packed_begins, packed_sums, sorted_line,
        panel_numbers;

  private:
    // Groups of 16 in pairs: the last may have none beside it, and then inputs of zero.
    int64_t numbers_of_panel() const { return (scales.groups + scales.groups % 2) * PANEL; }

    void decode(const Numbers& from, int64_t panel, float* to) const {
        from.decode(first_panel + panel, to);
        std::fill(to + scales.groups * PANEL, to + numbers_of_panel(), 0.0f);
    }

    // In two lanes: with codes from 0 to 15 each stays within 16 · 127 · 15 for the offset 8, and for no other is it more.
    int32_t beginning(int32_t sum) const {
        if (!lanes) return -offset * sum;
        const uint32_t lane = uint16_t(-offset / 2 * sum);
        return int32_t(lane | lane << 16);
    }

    // The levels of a group as words of four bytes, or of two numbers of 16 bits: the even ones, then the odd ones.
    void spread(const int32_t (&level)[GROUP], int32_t* to, int rows) const {
        if (words == 1) {
            int8_t bytes[GROUP];
            for (int i = 0; i < GROUP; i++) bytes[i] = int8_t(level[i]);
            for (int k = 0; k < WORDS; k++) memcpy(to + k * rows, bytes + 4 * k, 4);
            return;
        }
        int32_t pairs[2 * WORDS];
        for (int k = 0; k < WORDS; k++)
            for (int odd = 0; odd < 2; odd++)
                pairs[2 * k + odd] = (level[4 * k + odd] & 0xffff) | level[4 * k + odd + 2] << 16;
        for (int k = 0; k < 2 * WORDS; k++) to[k * rows] = pairs[k];
    }

    using Tile = void (*)(const CodesProduct&, int64_t, int, int64_t, bool, const float*, float*);

    template <class Codes, bool SHIFTED, int... I>
    static Tile tile_for(int rows, std::integer_sequence<int, I...>) {
        static constexpr Tile tiles[] = {tile<Codes, SHIFTED, I + 1>...};
        return tiles[rows - 1];
    }

    // The only row times the columns of a part of a panel. Weights and numbers are read front to back, from the first
    // panel to the last, and fetched in fixed distances. Where a panel has several parts, each fetches its own lines of the next
    // panel, so that none of them waits for memory while another one has nothing to fetch.
    template <class Codes, bool SHIFTED>
    void line(int64_t panel, int part, float* out) const {
        constexpr bool TWICE = Codes::HALVES || Codes::SPLIT;  // whether a group has two sums
        const uint8_t* weights = this->weights + panel * groups * Codes::STEP + part * NV * W * 4;
        const int32_t *input = packed, *begins = row_begins;
        const float *row_scale = row_scales, *sums = row_sums;
        const int64_t per = std::max<int64_t>(1, group / GROUP), column = part * NV * W;
        Numbers::Reader scale_of = scales.reader(first_panel + panel, column), shift_of{};
        if constexpr (SHIFTED) shift_of = shifts.reader(first_panel + panel, column);
        const int64_t far = PARTS == 1 ? FAR : groups * Codes::STEP;
        int64_t left = 1, numbers = scales.groups;
        vec total[NV], scale[NV], shift[NV], second_scale[NV], second_shift[NV];
        UNROLL for (int v = 0; v < NV; v++) total[v] = scale[v] = shift[v] = vset(0.0f);
        for (int64_t g = 0; g < groups; g++, weights += Codes::STEP) {
            UNROLL for (int at = 0; at < Codes::STEP / 64; at += PARTS) {
                __builtin_prefetch(weights + at * 64 + far, 0, 2);
                __builtin_prefetch(weights + at * 64 + NEAR);
            }
            if (--left == 0) {
                scale_of.next(scale);
                if constexpr (SHIFTED) shift_of.next(shift);
                left = per;
            }
            if constexpr (Codes::HALVES) {
                if (2 * g + 1 < numbers) {
                    scale_of.next(second_scale);
                    if constexpr (SHIFTED) shift_of.next(second_shift);
                } else {  // beside inputs of zero
                    UNROLL for (int v = 0; v < NV; v++) second_scale[v] = second_shift[v] = vset(0.0f);
                }
            }
            word sum[NV], taken[NV];
            vec first[NV];
            UNROLL for (int v = 0; v < NV; v++) sum[v] = wset(begins[0]);
            half<Codes, 1, false>(weights, input, sum);
            UNROLL for (int v = 0; v < NV; v++) {
                if constexpr (Codes::HALVES) first[v] = to_float(Codes::done(sum[v])) * scale[v];
                else if constexpr (Codes::SPLIT) taken[v] = Codes::done(sum[v]);
                if constexpr (TWICE) sum[v] = wset(begins[1]);
            }
            half<Codes, 1, true>(weights, input + WORDS_OF_HALF * Codes::WORDS, sum);
            const vec by = vset(*row_scale);
            UNROLL for (int v = 0; v < NV; v++) {
                word whole = Codes::done(sum[v]);
                if constexpr (Codes::SPLIT && !Codes::HALVES) whole = wadd(whole, taken[v]);
                if constexpr (Codes::HALVES) total[v] = fma(fma(to_float(whole), second_scale[v], first[v]), by, total[v]);
                else total[v] = fma(to_float(whole), scale[v] * by, total[v]);
                if constexpr (SHIFTED) total[v] = fma(shift[v], vset(sums[0]), total[v]);
                if constexpr (SHIFTED && TWICE)
                    total[v] = fma(Codes::HALVES ? second_shift[v] : shift[v], vset(sums[1]), total[v]);
            }
            input += WORDS * Codes::WORDS;
            row_scale++;
            begins += 2;
            sums += 2;
        }
        UNROLL for (int v = 0; v < NV; v++) vstore(out + column + v * W, total[v]);
    }

    // MR rows times the columns of a part of a panel: out [MR][PANEL]. The first part fetches what it reads next, and the
    // `next` panel while this one is read. Totals of few rows stay in registers, others in `out`, so that a tile's registers
    // hold one group's sums.
    template <class Codes, bool SHIFTED, int MR>
    static void tile(const CodesProduct& product, int64_t panel, int part, int64_t row, bool next, const float* decoded,
                     float* out) {
        constexpr bool FEW = MR * NV <= (W == 16 ? 12 : 6);
        constexpr bool TWICE = Codes::HALVES || Codes::SPLIT;  // whether a group has two sums
        const int64_t groups = product.groups, panel_bytes = groups * Codes::STEP;
        const uint8_t* weights = product.weights + panel * panel_bytes + part * NV * W * 4;
        const int64_t ahead = next ? panel_bytes : 0;
        const int32_t* input = product.packed + row * groups * WORDS * Codes::WORDS;
        const float* row_scales = product.row_scales + row * groups;
        const int32_t* begins = product.row_begins + 2 * row * groups;
        const float* row_sums = product.row_sums + 2 * row * groups;
        const int64_t per = std::max<int64_t>(1, product.group / GROUP), numbers = product.numbers_of_panel();
        int64_t left = per;
        const float* scale = decoded + part * NV * W;
        const float* shift = scale + numbers;
        out += part * NV * W;
        vec total[FEW ? MR * NV : 1];
        UNROLL for (int i = 0; i < MR * NV; i++) {
            if constexpr (FEW) total[i] = vset(0.0f);
            else vstore(out + i / NV * PANEL + i % NV * W, vset(0.0f));
        }
        for (int64_t g = 0; g < groups; g++, weights += Codes::STEP) {
            UNROLL for (int line = 0; line < Codes::STEP / 64; line += PARTS) {
                __builtin_prefetch(weights + line * 64 + ahead, 0, 2);
                __builtin_prefetch(weights + line * 64 + 1024);
            }
            word sum[MR * NV];
            vec first[Codes::HALVES ? MR * NV : 1], scales[NV];
            word taken[Codes::SPLIT && !Codes::HALVES ? MR * NV : 1];
            UNROLL for (int v = 0; v < NV; v++) scales[v] = vload(scale + v * W);
            UNROLL for (int i = 0; i < MR * NV; i++) sum[i] = wset(begins[i / NV]);
            product.half<Codes, MR, false>(weights, input, sum);
            if constexpr (Codes::HALVES) {
                UNROLL for (int i = 0; i < MR * NV; i++) first[i] = to_float(Codes::done(sum[i])) * scales[i % NV];
                UNROLL for (int v = 0; v < NV; v++) scales[v] = vload(scale + PANEL + v * W);
            } else if constexpr (Codes::SPLIT) {
                UNROLL for (int i = 0; i < MR * NV; i++) taken[i] = Codes::done(sum[i]);
            }
            if constexpr (TWICE)
                UNROLL for (int i = 0; i < MR * NV; i++) sum[i] = wset(begins[MR + i / NV]);
            product.half<Codes, MR, true>(weights, input + WORDS_OF_HALF * Codes::WORDS * MR, sum);
            UNROLL for (int m = 0; m < MR; m++) {
                const vec by = vset(row_scales[m]);
                UNROLL for (int v = 0; v < NV; v++) {
                    const int i = m * NV + v;
                    float* to = out + m * PANEL + v * W;
                    vec value = FEW ? total[FEW ? i : 0] : vload(to);
                    word whole = Codes::done(sum[i]);
                    if constexpr (Codes::SPLIT && !Codes::HALVES) whole = wadd(whole, taken[i]);
                    if constexpr (Codes::HALVES)
                        value = fma(fma(to_float(whole), scales[v], first[i]), by, value);
                    else
                        value = fma(to_float(whole), scales[v] * by, value);
                    if constexpr (SHIFTED) value = fma(vload(shift + v * W), vset(row_sums[m]), value);
                    if constexpr (SHIFTED && TWICE)
                        value = fma(vload(shift + (Codes::HALVES ? PANEL : 0) + v * W), vset(row_sums[MR + m]), value);
                    if constexpr (FEW) total[i] = value;
                    else vstore(to, value);
                }
            }
            input += WORDS * Codes::WORDS * MR;
            row_scales += MR;
            begins += 2 * MR;
            row_sums += 2 * MR;
            if (Codes::HALVES || --left == 0) {
                scale += Codes::HALVES ? 2 * PANEL : PANEL;
                if constexpr (SHIFTED) shift += Codes::HALVES ? 2 * PANEL : PANEL;
                left = per;
            }
        }
        if constexpr (FEW)
            UNROLL for (int i = 0; i < MR * NV; i++) vstore(out + i / NV * PANEL + i % NV * W, total[i]);
    }

    // Adds the products of half a group. A loop for many rows, not unrolled: unrolled, all inputs would be fetched ahead and
    // not fit into the registers.
    template <class Codes, int MR, bool SECOND>
    inline __attribute__((always_inline)) void half(const uint8_t* at, const int32_t* input, word* sums) const {
        word sum[MR * NV];
        UNROLL for (int i = 0; i < MR * NV; i++) sum[i] = sums[i];
        auto step = [&](int k) __attribute__((always_inline)) {
            typename Codes::Weights w[NV];
            UNROLL for (int v = 0; v < NV; v++) w[v] = Codes::load(at + v * W * 4, table, k, SECOND);
            UNROLL for (int m = 0; m < MR; m++) {
                const auto x = Codes::input(input + k * Codes::WORDS * MR + m, MR);
                UNROLL for (int v = 0; v < NV; v++) sum[m * NV + v] = Codes::add(sum[m * NV + v], w[v], x);
            }
        };
        if constexpr (MR <= 2 || Codes::WORDS == 1) {
            UNROLL for (int k = 0; k < WORDS_OF_HALF; k++) step(k);
        } else {
#pragma GCC unroll 1
            for (int k = 0; k < WORDS_OF_HALF; k++) step(k);
        }
        UNROLL for (int i = 0; i < MR * NV; i++) sums[i] = sum[i];
    }
};

thread_local Scratch CodesProduct::packed_words, CodesProduct::packed_scales, CodesProduct::packed_begins,
    CodesProduct::packed_sums, CodesProduct::sorted_line, CodesProduct::panel_numbers;

// The products of the experts, or of the one matrix, that have rows.
template <class Codes>
void run(CodesProduct one, const Experts& experts) {
    one.words = Codes::WORDS;
    one.top = Codes::TOP;
    one.packed = CodesProduct::packed_words.get<int32_t>(one.M * one.groups * WORDS * Codes::WORDS);
    one.row_scales = CodesProduct::packed_scales.get<float>(one.M * one.groups);
    one.row_begins = CodesProduct::packed_begins.get<int32_t>(one.M * one.groups * 2);
    one.row_sums = CodesProduct::packed_sums.get<float>(one.M * one.groups * 2);
    one.apart = Codes::HALVES || Codes::SPLIT;
    one.lanes = Codes::SUMS16;
    const int64_t panels = (one.N + PANEL - 1) / PANEL;
    experts.run(
        one, STREAM_CHUNK,
        [&](CodesProduct& product, int64_t expert, int64_t row) {
            product.weights += expert * panels * one.groups * Codes::STEP;
            product.first_panel = expert * panels;
            product.packed += row * one.groups * WORDS * Codes::WORDS;
            product.row_scales += row * one.groups;
            product.row_begins += row * one.groups * 2;
            product.row_sums += row * one.groups * 2;
            product.tiles = Tiles(product.M, Codes::ROWS);
        },
        [](const CodesProduct& product, int64_t start, int64_t end) { product.compute<Codes>(start, end); });
}

}  // namespace

// out [M, N] = input [M, K] · Wᵀ + bias + residual. `kind`, beside inputs of 8 bits: 0 codes of 4 bits, 1 of 8 bits, 2 codes of
// 4 bits with a table of levels from 0 to 32, 3 with one of bytes; beside inputs of 16 bits: 4 codes of 4 bits, 5 of 8 bits, 6
// codes of 4 bits with a table of bytes, 7 with one of 16 bits; codes of 2 bits: 8 beside inputs of 8 bits, 9 of 16. `offset` is
// taken off the levels. Scales and shifts each: type, numbers, what spans share. `order`, if given, says which input stands
// where. `starts`, if given, says which rows each of `experts` matrices has, all of N outputs: those from starts[e] to
// starts[e + 1].
EXPORT int64_t motet_linear_codes(const void* input, int64_t input_bf16, int64_t input_stride, const uint8_t* weights,
                                  int64_t kind, const int8_t* table, int64_t offset, float unit, int64_t scale_kind,
                                  const void* scale_fine, const void* scale_coarse, int64_t shift_kind,
                                  const void* shift_fine, const void* shift_coarse, int64_t span, const int32_t* order,
                                  int64_t group, const float* bias, const void* residual, int64_t residual_stride, void* out,
                                  int64_t out_bf16, int64_t out_stride, const int64_t* starts, int64_t experts, int64_t M,
                                  int64_t N, int64_t K) {
    if (M <= 0) return 0;
    const int64_t numbers = (K + group - 1) / group;
    CodesProduct one{{input, input_bf16, input_stride, bias, residual, residual_stride, out, out_bf16, out_stride, M, N, K},
                     weights,
                     0,
                     table,
                     {scale_kind, scale_fine, scale_coarse, numbers, span},
                     {shift_kind, shift_fine, shift_coarse, numbers, span},
                     order,
                     group,
                     int32_t(offset),
                     unit,
                     (K + GROUP - 1) / GROUP};
    const Experts all{starts, experts};
    const bool halves = group < GROUP;
    switch (kind) {
        case 0: halves ? run<Nibbles<true>>(one, all) : run<Nibbles<false>>(one, all); break;
        case 1: halves ? run<ShortBytes<true>>(one, all) : run<ShortBytes<false>>(one, all); break;
        case 2: halves ? run<LowTable<true>>(one, all) : run<LowTable<false>>(one, all); break;
        case 3: halves ? run<ShortTable<true>>(one, all) : run<ShortTable<false>>(one, all); break;
        case 4: halves ? run<WideNibbles<true>>(one, all) : run<WideNibbles<false>>(one, all); break;
        case 5: halves ? run<Bytes<true>>(one, all) : run<Bytes<false>>(one, all); break;
        case 6: halves ? run<ByteTable<true>>(one, all) : run<ByteTable<false>>(one, all); break;
        case 7: run<WideTable>(one, all); break;
        case 8: halves ? run<Crumbs<true>>(one, all) : run<Crumbs<false>>(one, all); break;
        default: halves ? run<WideCrumbs<true>>(one, all) : run<WideCrumbs<false>>(one, all);
    }
    return 0;
}

REPLAYABLE(motet_linear_codes)
