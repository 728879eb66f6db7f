// Root mean square norm and layer norm, row by row: sums are taken in an order that depends on the width alone.
#include "norm.h"
#include "parallel.h"
#include "replay.h"

namespace {

template <typename T>
void rms_norms(const T* x, int64_t stride, const float* weight, T* out, int64_t rows, int64_t width, float eps,
               float offset) {
    const int threads = threads_for(rows * width * 2, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) rms_norm(x + m * stride, weight, out + m * width, width, eps, offset);
}

template <typename T>
void layer_norms(const T* x, int64_t stride, const float* weight, const float* bias, T* out, int64_t rows, int64_t width,
                 float eps) {
    const int threads = threads_for(rows * width * 3, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) layer_norm(x + m * stride, weight, bias, out + m * width, width, eps);
}

}  // namespace

// out [M, width], dense, of x [M, width] with rows `stride` apart, both float32 or, if `is_bf16`, bfloat16.
EXPORT int64_t motet_rms_norm(const void* x, int64_t is_bf16, int64_t stride, const float* weight, void* out, int64_t rows,
                              int64_t width, float eps, float offset) {
    if (is_bf16)
        rms_norms(static_cast<const bf16*>(x), stride, weight, static_cast<bf16*>(out), rows, width, eps, offset);
    else
        rms_norms(static_cast<const float*>(x), stride, weight, static_cast<float*>(out), rows, width, eps, offset);
    return 0;
}

// The same of a layer norm.
EXPORT int64_t motet_layer_norm(const void* x, int64_t is_bf16, int64_t stride, const float* weight, const float* bias,
                                void* out, int64_t rows, int64_t width, float eps) {
    if (is_bf16)
        layer_norms(static_cast<const bf16*>(x), stride, weight, bias, static_cast<bf16*>(out), rows, width, eps);
    else
        layer_norms(static_cast<const float*>(x), stride, weight, bias, static_cast<float*>(out), rows, width, eps);
    return 0;
}

REPLAYABLE(motet_rms_norm)
REPLAYABLE(motet_layer_norm)
