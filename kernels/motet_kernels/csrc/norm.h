// The norms of one row of float32 or bfloat16, for kernels that have one in hand.
#pragma once

#include <cmath>

#include "parts.h"

// out = x / sqrt(mean(x^2) + eps) * (offset + weight). In place if out is x.
template <typename T>
INLINE void rms_norm(const T* x, const float* weight, T* out, int64_t width, float eps, float offset) {
    vec sums[4] = {vset(0), vset(0), vset(0), vset(0)};
    int64_t i = 0;
    for (; i + 4 * W <= width; i += 4 * W)
        for (int part = 0; part < 4; part++) {
            vec v = vload(x + i + part * W);
            sums[part] = fma(v, v, sums[part]);
        }
    for (; i + W <= width; i += W) {
        vec v = vload(x + i);
        sums[0] = fma(v, v, sums[0]);
    }
    if (i < width) {
        vec v = vload_part(x + i, width - i);
        sums[1] = fma(v, v, sums[1]);
    }
    const float mean = vsum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(width);
    const vec scale = vset(1.0f / std::sqrt(mean + eps)), shift = vset(offset);
    for (i = 0; i + W <= width; i += W) vstore(out + i, vload(x + i) * scale * (shift + vload(weight + i)));
    if (i < width) {
        vec part = vload_part(x + i, width - i) * scale * (shift + vload_part(weight + i, width - i));
        vstore_part(out + i, part, width - i);
    }
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias. In place if out is x.
template <typename T>
INLINE void layer_norm(const T* x, const float* weight, const float* bias, T* out, int64_t width, float eps) {
    const int64_t whole = width / W * W, rest = width - whole;
    vec sum = vset(0);
    for (int64_t i = 0; i < whole; i += W) sum = sum + vload(x + i);
    if (rest) sum = sum + vload_part(x + whole, rest);
    const float middle = vsum_lanes(sum) / float(width);
    const vec mean = vset(middle);
    vec squares = vset(0);
    for (int64_t i = 0; i < whole; i += W) {
        vec v = vload(x + i) - mean;
        squares = fma(v, v, squares);
    }
    float variance = vsum_lanes(squares);
    for (int64_t i = whole; i < width; i++) variance += (widen(x[i]) - middle) * (widen(x[i]) - middle);
    const vec scale = vset(1.0f / std::sqrt(variance / float(width) + eps));
    for (int64_t i = 0; i < whole; i += W)
        vstore(out + i, fma((vload(x + i) - mean) * scale, vload(weight + i), vload(bias + i)));
    if (rest) {
        vec v = (vload_part(x + whole, rest) - mean) * scale;
        vstore_part(out + whole, fma(v, vload_part(weight + whole, rest), vload_part(bias + whole, rest)), rest);
    }
}
