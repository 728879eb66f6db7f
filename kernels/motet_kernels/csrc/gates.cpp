// Activations of gates, row by row in whole vectors: an element's bits depend on nothing but its value.
#include "parallel.h"
#include "parts.h"
#include "replay.h"

namespace {

INLINE vec sigmoid(vec x) { return vset(1.0f) / (vset(1.0f) + vexp(-x)); }
INLINE vec silu(vec x) { return x / (vset(1.0f) + vexp(-x)); }

// max(x, 0) + log(1 + t), t = e^-|x|, where log(1 + t) = 2 artanh(t / (2 + t)): a series in at most 1/3.
INLINE vec softplus(vec x) {
    vec t = vexp(-vabs(x)), s = t / (vset(2.0f) + t), square = s * s;
    vec y = vset(1.0f / 15);
    for (int k = 13; k > 0; k -= 2) y = fma(y, square, vset(1.0f / k));
    return fma(s + s, y, vselect_less(x, vset(0.0f), x - x, x));
}

// x · Φ(x), where Φ(-|x|) = polynomial(t) · e^(-x²/2), t = 1 / (1 + p|x|/√2) (Abramowitz and Stegun 7.1.26).
INLINE vec gelu(vec x) {
    vec size = vabs(x), t = vset(1.0f) / fma(size, vset(0.3275911f * 0.70710678f), vset(1.0f));
    vec y = vset(1.061405429f);
    for (float a : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) y = fma(y, t, vset(a));
    vec tail = vset(0.5f) * y * t * vexp(vset(-0.5f) * x * x);
    return x * vselect_less(x, vset(0.0f), tail, vset(1.0f) - tail);
}

// x · Φ(x) by tanh (Hendrycks and Gimpel 2016).
INLINE vec gelu_tanh(vec x) {
    vec inner = vset(0.79788456f) * fma(vset(0.044715f) * x * x, x, x);
    return vset(0.5f) * x * (vset(1.0f) + vtanh(inner));
}

template <vec (*F)(vec)>
void row(const float* x, float* out, int64_t width) {
    int64_t i = 0;
    for (; i + W <= width; i += W) vstore(out + i, F(vload(x + i)));
    if (i == width) return;
    vstore_part(out + i, F(vload_part(x + i, width - i)), width - i);
}

// out = F(gate) · up, both in one row.
template <vec (*F)(vec)>
void gated_row(const float* x, float* out, int64_t width) {
    int64_t i = 0;
    for (; i + W <= width; i += W) vstore(out + i, F(vload(x + i)) * vload(x + width + i));
    if (i == width) return;
    vstore_part(out + i, F(vload_part(x + i, width - i)) * vload_part(x + width + i, width - i), width - i);
}

}  // namespace

// out [M, width], dense, of x [M, 2 width]: gate, then up. Kind 0 is SiLU, 1 GELU by tanh.
EXPORT int64_t motet_gated(const float* x, int64_t stride, float* out, int64_t rows, int64_t width, int64_t kind) {
    void (*const run)(const float*, float*, int64_t) = kind == 0 ? gated_row<silu> : gated_row<gelu_tanh>;
    const int threads = threads_for(rows * width * 12, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) run(x + m * stride, out + m * width, width);
    return 0;
}

// out [M, width], dense, of x [M, width]. Kind 0 is sigmoid, 1 SiLU, 2 softplus, 3 GELU, 4 GELU by tanh.
EXPORT int64_t motet_gate(const float* x, int64_t stride, float* out, int64_t rows, int64_t width, int64_t kind) {
    constexpr void (*kinds[])(const float*, float*, int64_t) = {
        row<sigmoid>, row<silu>, row<softplus>, row<gelu>, row<gelu_tanh>};
    void (*const run)(const float*, float*, int64_t) = kinds[kind];
    const int threads = threads_for(rows * width * 10, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) run(x + m * stride, out + m * width, width);
    return 0;
}

REPLAYABLE(motet_gated)
REPLAYABLE(motet_gate)
