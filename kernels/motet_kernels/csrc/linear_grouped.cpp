// x · Wᵀ for weights in float8 (e4m3) with scales by groups of inputs; the input stays as it is.
//
// Codes lie row by row, a byte each. An output is the sum over groups of scale · Σ code · x, in lanes: one order for
// every row, however many rows share the weights. K is padded with zeros to whole 32.
#include "codes.h"
#include "linear.h"
#include "replay.h"

namespace {

constexpr int64_t HALF = 16;
constexpr int MOST_ROWS = 4;

struct Float8Product : Product {
    const uint8_t* codes;
    const float* scales;   // [N][groups]
    const int32_t* order;  // which input stands where, or null
    int64_t group, groups, padded;
    float* rows;           // the input [M][padded]

    template <typename T>
    void take(int64_t m) const {
        const T* from = static_cast<const T*>(input) + m * input_stride;
        float* row = rows + m * padded;
        if (order)
            for (int64_t k = 0; k < K; k++) row[k] = widen(from[order[k]]);
        else
            for (int64_t k = 0; k < K; k++) row[k] = widen(from[k]);
        std::fill(row + K, row + padded, 0.0f);
    }

    // Outputs `column`.. of rows `row`.. into out [MR][PANEL]. Columns that there are not repeat the last one.
    template <int NR, int MR>
    void tile(int64_t column, int64_t row, float* out) const {
        const fp8* code[NR];
        const float* scale[NR];
        UNROLL for (int n = 0; n < NR; n++) {
            const int64_t at = std::min(column + n, N - 1);
            code[n] = reinterpret_cast<const fp8*>(codes) + at * padded;
            scale[n] = scales + at * groups;
        }
        const float* x = rows + row * padded;
        vec total[NR * MR];
        UNROLL for (int i = 0; i < NR * MR; i++) total[i] = vset(0.0f);
        for (int64_t g = 0; g < groups; g++) {
            vec sum[NR * MR];
            UNROLL for (int i = 0; i < NR * MR; i++) sum[i] = vset(0.0f);
            const int64_t end = std::min((g + 1) * group, padded);
            for (int64_t begin = g * group; begin < end; begin += HALF) {
                UNROLL for (int64_t at = 0; at < HALF; at += W) {
                    vec w[NR];
                    UNROLL for (int n = 0; n < NR; n++) w[n] = vload(code[n] + begin + at);
                    UNROLL for (int m = 0; m < MR; m++) {
                        const vec input = vload(x + m * padded + begin + at);
                        UNROLL for (int n = 0; n < NR; n++) sum[n * MR + m] = fma(w[n], input, sum[n * MR + m]);
                    }
                }
            }
            UNROLL for (int i = 0; i < NR * MR; i++) total[i] = fma(vset(scale[i / MR][g]), sum[i], total[i]);
        }
        UNROLL for (int i = 0; i < NR * MR; i++) out[i % MR * PANEL + i / MR] = vsum_lanes(total[i]);
    }

    template <int NR, int MR>
    void panel(int64_t panel, int64_t row) const {
        alignas(64) float out[MR * PANEL];
        for (int n = 0; n < PANEL && panel * PANEL + n < N; n += NR) tile<NR, MR>(panel * PANEL + n, row, out + n);
        finish(out, row, MR, panel * PANEL);
    }

    void run() {
        const int threads = threads_for(M * N * K / 2, (N + PANEL - 1) / PANEL);
#pragma omp parallel for num_threads(threads) if (threads > 1 && M > 1)
        for (int64_t m = 0; m < M; m++) input_bf16 ? take<bf16>(m) : take<float>(m);
        over_panels(threads, N, STREAM_CHUNK, 1, [&](int64_t start, int64_t end, int64_t) {
            for (int64_t p = start; p < end; p++) {
                int64_t row = 0;
                for (; row + MOST_ROWS <= M; row += MOST_ROWS) panel<2, MOST_ROWS>(p, row);
                for (; row + 2 <= M; row += 2) panel<4, 2>(p, row);
                for (; row < M; row++) panel<4, 1>(p, row);
            }
        });
    }
};

thread_local Scratch taken_rows;

}  // namespace

// out [M, N] = input [M, K] · Wᵀ + bias + residual. `group` is a multiple of 16.
EXPORT int64_t motet_linear_grouped(const void* input, int64_t input_bf16, int64_t input_stride, const uint8_t* codes,
                                    const float* scales, const int32_t* order, int64_t group, const float* bias,
                                    const void* residual, int64_t residual_stride, void* out, int64_t out_bf16,
                                    int64_t out_stride, int64_t M, int64_t N, int64_t K) {
    if (M <= 0) return 0;
    const int64_t padded = (K + 31) / 32 * 32, groups = (K + group - 1) / group;
    Float8Product product{{input, input_bf16, input_stride, bias, residual, residual_stride, out, out_bf16, out_stride, M, N, K},
                          codes,
                          scales,
                          order,
                          group,
                          groups,
                          padded,
                          taken_rows.get<float>(M * padded)};
    product.run();
    return 0;
}

REPLAYABLE(motet_linear_grouped)
