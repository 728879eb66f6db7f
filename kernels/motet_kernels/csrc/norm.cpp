// Root mean square norm and layer norm, row by row: sums are taken in an order that depends on the width alone.
#include "norm.h"
#include "parallel.h"
#include "replay.h"

// out [M, width], dense, of x [M, width] with rows `stride` apart.
EXPORT int64_t motet_rms_norm(const float* x, int64_t stride, const float* weight, float* out, int64_t rows,
                              int64_t width, float eps, float offset) {
    const int threads = threads_for(rows * width * 2, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) rms_norm(x + m * stride, weight, out + m * width, width, eps, offset);
    return 0;
}

// The same of a layer norm.
EXPORT int64_t motet_layer_norm(const float* x, int64_t stride, const float* weight, const float* bias, float* out,
                                int64_t rows, int64_t width, float eps) {
    const int threads = threads_for(rows * width * 3, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < rows; m++) layer_norm(x + m * stride, weight, bias, out + m * width, width, eps);
    return 0;
}

REPLAYABLE(motet_rms_norm)
REPLAYABLE(motet_layer_norm)
