// Scores and weighted values of a block of keys by AMX, for queries and a cache in bfloat16.
//
// Lines are taken in groups of 16. Of scores the tiles of input are 16 keys as they lie in the cache, and those of "weights"
// the queries of a group; of values the weights of a group, and 32 keys of which two lie side by side. A score is one sum over
// D in steps of 32, an accumulator of values takes in 32 keys at a time: the same bits for a line in any group.
#pragma once

#include "amx.h"
#include "attention_tiles.h"

namespace {

constexpr int AMX_LINES = 16;

// Fetches rows of a block, each of its keys and values, a few at a time between products.
struct BlockFetch {
    const char *const *keys, *const *values;
    int64_t key_bytes, value_bytes;
    int at = 0;  // of 2 · KEYS

    void some(int rows) {
        for (const int end = std::min(2 * KEYS, at + rows); at < end; at++)
            at % 2 ? prefetch(values[spread(at / 2)], value_bytes) : prefetch(keys[spread(at / 2)], key_bytes);
    }
};

#if defined(__AMX_BF16__)

// Queries of a group, [16][dim], to [dim / 32][16 pairs of D][16 lines].
INLINE void pack_queries(const bf16* query_LD, int64_t dim, bf16* packed) {
    for (int64_t d = 0; d < dim; d += PAIRS)
        transpose(reinterpret_cast<const float*>(query_LD + d), dim / 2, 16, reinterpret_cast<float*>(packed + d * 16));
}

// Values of KEYS keys to [KEYS / 32][dim / 16][16 pairs of keys][16 columns], columns in the order of low_pairs and high_pairs.
// Keys with a number that is not finite count as 0; returns a bit for each of them.
INLINE uint64_t pack_values(const bf16* const* values, int64_t dim, bf16* packed, BlockFetch& fetch) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    auto exponents = [&](vec x) { return _mm512_and_si512(_mm512_castps_si512(x), exponent); };
    auto has_most = [&](__m512i x) { return _mm512_cmpeq_epi16_mask(x, exponent) != 0; };
    __m512i largest = _mm512_setzero_si512();
    for (int k = 0; k < KEYS; k += 2) {
        fetch.some(2);
        bf16* to = packed + k / 32 * 32 * dim + k % 32 * 16;
        for (int64_t d = 0; d < dim; d += PAIRS, to += 2 * 512) {
            vec even = load_pairs(values[k] + d), odd = load_pairs(values[k + 1] + d);
            largest = _mm512_max_epu16(largest, _mm512_max_epu16(exponents(even), exponents(odd)));
            vstore(reinterpret_cast<float*>(to), low_pairs(even, odd));
            vstore(reinterpret_cast<float*>(to + 512), high_pairs(even, odd));
        }
    }
    if (!has_most(largest)) return 0;
    uint64_t left_out = 0;
    for (int k = 0; k < KEYS; k++) {
        bool is_finite = true;
        for (int64_t d = 0; d < dim; d += PAIRS) is_finite &= !has_most(exponents(load_pairs(values[k] + d)));
        if (is_finite) continue;
        left_out |= uint64_t(1) << k;
        bf16* to = packed + k / 32 * 32 * dim + k % 32 / 2 * 32 + k % 2;
        for (int64_t tile = 0; tile < dim / 16; tile++)
            for (int n = 0; n < 16; n++) to[tile * 512 + n * 2] = {0};
    }
    return left_out;
}

// f(0), f(1), f(2) and f(3), as constants that name tiles.
template <typename F>
INLINE void for_four_tiles(F&& f) {
    f(std::integral_constant<int, 0>());
    f(std::integral_constant<int, 1>());
    f(std::integral_constant<int, 2>());
    f(std::integral_constant<int, 3>());
}

// Where 16 keys lie: in the cache, or copied where they are not equally far from one another.
struct KeyTile {
    const bf16* at;
    int64_t stride;  // bytes

    KeyTile(const bf16* const* keys, int64_t dim, bf16* copy) {
        auto address = [&](int k) { return reinterpret_cast<const char*>(keys[k]); };
        at = keys[0], stride = address(1) - address(0);
        for (int k = 2; k < 16; k++)
            if (address(k) - address(k - 1) != stride) stride = 0;
        if (stride > 0) return;
        for (int k = 0; k < 16; k++) memcpy(copy + k * dim, keys[k], dim * sizeof(bf16));
        at = copy, stride = dim * sizeof(bf16);
    }
};

// Scores [16][KEYS] of a group with the keys of [from, to), in whole tiles of 16.
INLINE void amx_scores(const bf16* packed, int64_t dim, const bf16* const* keys, int from, int to, float scale, float* scores,
                       BlockFetch& fetch) {
    static thread_local Scratch copies;
    alignas(64) float sums[4][16 * 16];
    bf16* copy = copies.get<bf16>(KEYS * dim);
    const KeyTile tiles[4] = {{keys, dim, copy},
                              {keys + 16, dim, copy + 16 * dim},
                              {keys + 32, dim, copy + 32 * dim},
                              {keys + 48, dim, copy + 48 * dim}};
    auto wanted = [&](int i) { return from < 16 * i + 16 && 16 * i < to; };
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t d = 0; d < dim; d += PAIRS) {
        fetch.some(8);
        tile_load<6>(packed + d * 16, 64);
        for_four_tiles([&](auto tile) __attribute__((always_inline)) {
            constexpr int T = decltype(tile)::value;
            if (!wanted(T)) return;
            tile_load<4 + T % 2>(tiles[T].at + d, tiles[T].stride);
            AmxPairs::multiply<T, 4 + T % 2, 6>();
        });
    }
    tile_store<0>(sums[0], 64), tile_store<1>(sums[1], 64), tile_store<2>(sums[2], 64), tile_store<3>(sums[3], 64);
    for (int i = 0; i < 4; i++) {
        if (!wanted(i)) continue;
        UNROLL for (int k = 0; k < 16; k++) vstore(sums[i] + k * 16, vload(sums[i] + k * 16) * vset(scale));
        transpose(sums[i], 16, 16, scores + 16 * i, KEYS);
    }
}

// Accumulators [16][dim] of a group: decayed, then the weighted values of keys [from, to) added, in whole steps of 32.
// weights [16][2 · KEYS]: those of unseen keys are 0.
INLINE void amx_values(float* out, int64_t dim, const float* decay, const bf16* weights, const bf16* packed, int from, int to,
                       BlockFetch& fetch) {
    for (int l = 0; l < AMX_LINES; l++) {
        if (decay[l] == 1.0f) continue;
        for (int64_t d = 0; d < dim; d += W) vstore(out + l * dim + d, vload(out + l * dim + d) * vset(decay[l]));
    }
    const bool first = from < 32, second = to > 32;
    if (first) tile_load<4>(weights, 4 * KEYS);
    if (second) tile_load<5>(weights + 32, 4 * KEYS);
    for (int64_t begin = 0; begin < dim; begin += 64) {
        auto each = [&](auto f) __attribute__((always_inline)) {
            for_four_tiles([&](auto tile) __attribute__((always_inline)) {
                if (const int64_t d = begin + 16 * decltype(tile)::value; d < dim) f(tile, d);
            });
        };
        fetch.some(8);
        each([&](auto tile, int64_t d) __attribute__((always_inline)) { tile_load<decltype(tile)::value>(out + d, dim * 4); });
        each([&](auto tile, int64_t d) __attribute__((always_inline)) {
            constexpr int T = decltype(tile)::value;
            if (first) {
                tile_load<6>(packed + d * 32, 64);
                AmxPairs::multiply<T, 4, 6>();
            }
            if (second) {
                tile_load<7>(packed + 32 * dim + d * 32, 64);
                AmxPairs::multiply<T, 5, 7>();
            }
        });
        each([&](auto tile, int64_t d) __attribute__((always_inline)) { tile_store<decltype(tile)::value>(out + d, dim * 4); });
    }
}

// Weights of a line that narrow_weights() did not set, to 0.
INLINE void clear_unseen(float* scores, Range seen) {
    bf16* weights = reinterpret_cast<bf16*>(scores);
    for (int k = 0; k < KEYS; k += W)
        if (seen.empty() || k + W <= seen.from || k >= seen.to) memset(weights + k, 0, W * sizeof(bf16));
}

// A line's weighted value of a key that pack_values left out, columns in its order.
INLINE void add_value(float* out, int64_t dim, bf16 weight, const bf16* value) {
    for (int64_t d = 0; d < dim; d++) {
        const int64_t column = d % PAIRS, part = column / 8, n = column % 8;
        out[d - column + n / 4 * W + part * 4 + n % 4] += widen(weight) * widen(value[d]);
    }
}

#else

INLINE void pack_queries(const bf16*, int64_t, bf16*) {}
INLINE uint64_t pack_values(const bf16* const*, int64_t, bf16*, BlockFetch&) { return 0; }
INLINE void amx_scores(const bf16*, int64_t, const bf16* const*, int, int, float, float*, BlockFetch&) {}
INLINE void amx_values(float*, int64_t, const float*, const bf16*, const bf16*, int, int, BlockFetch&) {}
INLINE void clear_unseen(float*, Range) {}
INLINE void add_value(float*, int64_t, bf16, const bf16*) {}

#endif

}  // namespace
