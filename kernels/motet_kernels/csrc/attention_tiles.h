// The inner loops of attention: scores, softmax and weighted values of one block of keys.
//
// A line is a query token and a head; a register tile takes NL lines at once. How lines and keys are put into tiles
// never shows in the result: see attention.cpp.
#pragma once

#include <algorithm>
#include <cmath>

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

// Scores of NL lines and W / NL keys. A sum runs over D in lanes, then over the lanes.
template <int NL, typename T>
void score_tile(const float* query, int64_t dim, const T* const* keys, float* scores) {
    constexpr int NK = W / NL;
    vec sums[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) sums[i] = vset(0.0f);
    for (int64_t d = 0; d < dim; d += W) {
        vec q[NL];
#pragma GCC unroll 16
        for (int l = 0; l < NL; l++) q[l] = vload(query + l * dim + d);
#pragma GCC unroll 16
        for (int k = 0; k < NK; k++) {
            vec key = vload(keys[k] + d);
#pragma GCC unroll 16
            for (int l = 0; l < NL; l++) sums[l * NK + k] = fma(q[l], key, sums[l * NK + k]);
        }
    }
    float tile[W];
    vstore(tile, vsum_each(sums));
#pragma GCC unroll 16
    for (int l = 0; l < NL; l++) memcpy(scores + l * KEYS, tile + l * NK, NK * sizeof(float));
}

// Scores of NL lines with the keys that any of them sees, while the values of these keys are on their way.
template <int NL, typename T>
void score_lines(const float* query, int64_t dim, const T* const* keys, const Range* seen, float* scores,
                 const char* const* values, int64_t value_bytes) {
    constexpr int NK = W / NL;
    int from = KEYS, to = 0;
    for (int l = 0; l < NL; l++) {
        if (seen[l].empty()) continue;
        from = std::min(from, seen[l].from), to = std::max(to, seen[l].to);
    }
    for (int k = from / NK * NK; k < to; k += NK) {
        for (int i = 0; i < NK; i++) prefetch(values[spread(k + i)], value_bytes);
        score_tile<NL>(query, dim, keys + k, scores + k);
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

// All columns from `column` on, the next block's keys on their way with the first of them.
template <int NL, int NV = std::min(8, ACCUMULATORS / NL), typename T>
void value_lines(float* out, int64_t dim, const float* decay, const float* weights, const Range* seen,
                 const T* const* values, int64_t column, const char* const* next, int64_t next_bytes) {
    for (; column + NV * W <= dim; column += NV * W, next_bytes = 0)
        value_tile<NL, NV>(out, dim, decay, weights, seen, values, column, next, next_bytes);
    if constexpr (NV > 1)
        value_lines<NL, NV / 2>(out, dim, decay, weights, seen, values, column, next, next_bytes);
}
