// Activations of rows, and gated ones.
#include "gates.h"
#include "parallel.h"
#include "parts.h"
#include "replay.h"

namespace {

template <vec (*F)(vec), typename T>
void row(const T* x, T* out, int64_t width) {
    int64_t i = 0;
    for (; i + W <= width; i += W) vstore(out + i, F(vload(x + i)));
    if (i == width) return;
    vstore_part(out + i, F(vload_part(x + i, width - i)), width - i);
}

// out = F(gate) · up, both in one row.
template <vec (*F)(vec), typename T>
void gated_row(const T* x, T* out, int64_t width) {
    int64_t i = 0;
    for (; i + W <= width; i += W) vstore(out + i, F(vload(x + i)) * vload(x + width + i));
    if (i == width) return;
    vstore_part(out + i, F(vload_part(x + i, width - i)) * vload_part(x + width + i, width - i), width - i);
}

template <typename T>
using Row = void (*)(const T* x, T* out, int64_t width);

template <typename T>
void gated(const T* x, int64_t stride, T* out, int64_t rows, int64_t width, int64_t kind) {
    const Row<T> run = kind == 0 ? gated_row<silu, T> : gated_row<gelu_tanh, T>;
    const int threads = threads_for(rows * width * 12, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) run(x + m * stride, out + m * width, width);
}

template <typename T>
void gate(const T* x, int64_t stride, T* out, int64_t rows, int64_t width, int64_t kind) {
    constexpr Row<T> kinds[] = {row<sigmoid, T>, row<silu, T>, row<softplus, T>, row<gelu, T>, row<gelu_tanh, T>};
    const Row<T> run = kinds[kind];
    const int threads = threads_for(rows * width * 10, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) run(x + m * stride, out + m * width, width);
}

}  // namespace

// out [M, width], dense, of x [M, 2 width]: gate, then up. Both are float32 or, if `is_bf16`, bfloat16. Kind 0 is SiLU, 1
// GELU by tanh.
EXPORT int64_t motet_gated(const void* x, int64_t is_bf16, int64_t stride, void* out, int64_t rows, int64_t width,
                           int64_t kind) {
    if (is_bf16)
        gated(static_cast<const bf16*>(x), stride, static_cast<bf16*>(out), rows, width, kind);
    else
        gated(static_cast<const float*>(x), stride, static_cast<float*>(out), rows, width, kind);
    return 0;
}

// out [M, width], dense, of x [M, width], types as above. Kind 0 is sigmoid, 1 SiLU, 2 softplus, 3 GELU, 4 GELU by tanh.
EXPORT int64_t motet_gate(const void* x, int64_t is_bf16, int64_t stride, void* out, int64_t rows, int64_t width,
                          int64_t kind) {
    if (is_bf16)
        gate(static_cast<const bf16*>(x), stride, static_cast<bf16*>(out), rows, width, kind);
    else
        gate(static_cast<const float*>(x), stride, static_cast<float*>(out), rows, width, kind);
    return 0;
}

REPLAYABLE(motet_gated)
REPLAYABLE(motet_gate)
