// Rotary embedding of attention heads, with the norm that some models put before it.
#include "norm.h"
#include "parallel.h"
#include "replay.h"

namespace {

// out[i] = x[i] cos[i] - x[i + R/2] sin[i], out[i + R/2] = x[i + R/2] cos[i + R/2] + x[i] sin[i + R/2]; the rest stays.
INLINE void rotate(const float* x, const float* cos, const float* sin, float* out, int64_t dim, int64_t rotary) {
    const int64_t half = rotary / 2;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        vec a = vload(x + i), b = vload(x + i + half);
        vstore(out + i, fma(a, vload(cos + i), -(b * vload(sin + i))));
        vstore(out + i + half, fma(b, vload(cos + i + half), a * vload(sin + i + half)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i + half] + a * sin[i + half];
    }
    if (out != x) std::copy(x + rotary, x + dim, out + rotary);
}

}  // namespace

// x [N, heads, dim] with rows `stride` apart, cos and sin [N, rotary] dense, out [N, heads, dim] dense. The first
// `queries` heads are normed with q_weight, the others with k_weight, where there are weights.
EXPORT int64_t motet_rotary(const float* x, int64_t stride, const float* cos, const float* sin, const float* q_weight,
                            const float* k_weight, float* out, int64_t tokens, int64_t heads, int64_t queries,
                            int64_t dim, int64_t rotary, float eps, float offset) {
    const int threads = threads_for(tokens * heads * dim * 4, tokens);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < tokens; n++)
        for (int64_t h = 0; h < heads; h++) {
            const float* from = x + n * stride + h * dim;
            float* to = out + (n * heads + h) * dim;
            const float* weight = h < queries ? q_weight : k_weight;
            if (weight) rms_norm(from, weight, to, dim, eps, offset), from = to;
            rotate(from, cos + n * rotary, sin + n * rotary, to, dim, rotary);
        }
    return 0;
}

REPLAYABLE(motet_rotary)
