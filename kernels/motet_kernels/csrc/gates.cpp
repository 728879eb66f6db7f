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

// cost: of an element, as threads_for() counts it.
template <typename T>
void each_row(Row<T> run, const void* x, int64_t stride, void* out, int64_t rows, int64_t width, int64_t cost) {
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    const int threads = threads_for(rows * width * cost, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) run(from + m * stride, to + m * width, width);
}

template <typename T>
Row<T> gated_kind(int64_t kind) {
    return kind == 0 ? gated_row<silu, T> : gated_row<gelu_tanh, T>;
}

template <typename T>
Row<T> gate_kind(int64_t kind) {
    constexpr Row<T> kinds[] = {row<sigmoid, T>, row<silu, T>, row<softplus, T>, row<gelu, T>, row<gelu_tanh, T>};
    return kinds[kind];
}

}  // namespace

// out [M, width], dense, of x [M, 2 width]: gate, then up. Both are float32 or, if `is_bf16`, bfloat16. Kind 0 is SiLU, 1
// GELU by tanh.
EXPORT int64_t motet_gated(const void* x, int64_t is_bf16, int64_t stride, void* out, int64_t rows, int64_t width,
                           int64_t kind) {
    if (is_bf16)
        each_row(gated_kind<bf16>(kind), x, stride, out, rows, width, 12);
    else
        each_row(gated_kind<float>(kind), x, stride, out, rows, width, 12);
    return 0;
}

// out [M, width], dense, of x [M, width], types as above. Kind 0 is sigmoid, 1 SiLU, 2 softplus, 3 GELU, 4 GELU by tanh.
EXPORT int64_t motet_gate(const void* x, int64_t is_bf16, int64_t stride, void* out, int64_t rows, int64_t width,
                          int64_t kind) {
    if (is_bf16)
        each_row(gate_kind<bf16>(kind), x, stride, out, rows, width, 10);
    else
        each_row(gate_kind<float>(kind), x, stride, out, rows, width, 10);
    return 0;
}

REPLAYABLE(motet_gated)
REPLAYABLE(motet_gate)
