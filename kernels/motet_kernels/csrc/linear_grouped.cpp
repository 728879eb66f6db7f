// x · Wᵀ for weights of 4 or 8 bits in groups of inputs, as ready-made checkpoints have them; the input stays as it is.
//
// A weight is scale · code + shift, with a scale and a shift for each group of an output's inputs. Codes lie row by row:
// int8 and float8 a byte each, int4 in 16 bytes per 32 inputs, byte j the input j in the low half, 16 + j in the high one.
// An output is the sum over groups of scale · Σ code · x, in lanes, and of shift · Σ x beside it: one order for
// every row, however many rows share the weights. K is padded with zeros to whole 32.
#include "codes.h"
#include "linear.h"
#include "replay.h"

namespace {

constexpr int64_t HALF = 16;
constexpr int MOST_ROWS = 4;

struct Int4 {
    static int64_t bytes(int64_t k) { return k / 2; }
    // W codes from input k + 16 · half + at on.
    INLINE vec load(const uint8_t* row, int64_t k, int64_t half, int64_t at) {
        return vnibbles(row + k / 2 + at, half);
    }
};

struct Int8 {
    static int64_t bytes(int64_t k) { return k; }
    INLINE vec load(const uint8_t* row, int64_t k, int64_t half, int64_t at) {
        return vload(reinterpret_cast<const int8_t*>(row) + k + half * HALF + at);
    }
};

struct Float8 {
    static int64_t bytes(int64_t k) { return k; }
    INLINE vec load(const uint8_t* row, int64_t k, int64_t half, int64_t at) {
        return vload(reinterpret_cast<const fp8*>(row) + k + half * HALF + at);
    }
};

struct GroupedProduct : Product {
    const uint8_t* codes;
    const float *scales, *shifts;  // [N][groups]; shifts may be null: then they are -offset · scale
    const int32_t* order;          // which input stands where, or null
    int64_t group, groups, padded;
    float offset;
    float *rows, *sums;  // the input [M][padded] and by group [M][groups]

    template <typename T>
    void take(int64_t m) const {
        const T* from = static_cast<const T*>(input) + m * input_stride;
        float *row = rows + m * padded, *sum = sums + m * groups;
        if (order)
            for (int64_t k = 0; k < K; k++) row[k] = widen(from[order[k]]);
        else
            for (int64_t k = 0; k < K; k++) row[k] = widen(from[k]);
        std::fill(row + K, row + padded, 0.0f);
        for (int64_t g = 0; g < groups; g++) {
            vec total = vset(0.0f);
            for (int64_t k = g * group; k < std::min((g + 1) * group, padded); k += W) total = total + vload(row + k);
            sum[g] = vsum_lanes(total);
        }
    }

    bool corrects() const { return shifts || offset != 0.0f; }

    // Outputs `column`.. of rows `row`.. into out [MR][PANEL]. Columns that there are not repeat the last one.
    template <class Codes, int NR, int MR>
    void tile(int64_t column, int64_t row, float* out) const {
        const uint8_t* code[NR];
        const float *scale[NR], *shift[NR];
        UNROLL for (int n = 0; n < NR; n++) {
            const int64_t at = std::min(column + n, N - 1);
            code[n] = codes + at * Codes::bytes(padded);
            scale[n] = scales + at * groups;
            shift[n] = shifts ? shifts + at * groups : nullptr;
        }
        const float* x = rows + row * padded;
        vec total[NR * MR];
        float more[NR * MR];
        UNROLL for (int i = 0; i < NR * MR; i++) total[i] = vset(0.0f), more[i] = 0.0f;
        for (int64_t g = 0; g < groups; g++) {
            vec sum[NR * MR];
            UNROLL for (int i = 0; i < NR * MR; i++) sum[i] = vset(0.0f);
            const int64_t end = std::min((g + 1) * group, padded);
            for (int64_t begin = g * group; begin < end; begin += HALF) {
                const int64_t k = begin / (2 * HALF) * (2 * HALF), half = begin / HALF % 2;
                UNROLL for (int64_t at = 0; at < HALF; at += W) {
                    vec w[NR];
                    UNROLL for (int n = 0; n < NR; n++) w[n] = Codes::load(code[n], k, half, at);
                    UNROLL for (int m = 0; m < MR; m++) {
                        const vec input = vload(x + m * padded + begin + at);
                        UNROLL for (int n = 0; n < NR; n++) sum[n * MR + m] = fma(w[n], input, sum[n * MR + m]);
                    }
                }
            }
            UNROLL for (int i = 0; i < NR * MR; i++) total[i] = fma(vset(scale[i / MR][g]), sum[i], total[i]);
            if (corrects()) {
                UNROLL for (int i = 0; i < NR * MR; i++) {
                    const float by = shift[i / MR] ? shift[i / MR][g] : -offset * scale[i / MR][g];
                    more[i] += by * sums[(row + i % MR) * groups + g];
                }
            }
        }
        UNROLL for (int i = 0; i < NR * MR; i++) out[i % MR * PANEL + i / MR] = vsum_lanes(total[i]) + more[i];
    }

    template <class Codes, int NR, int MR>
    void panel(int64_t panel, int64_t row) const {
        alignas(64) float out[MR * PANEL];
        for (int n = 0; n < PANEL && panel * PANEL + n < N; n += NR) tile<Codes, NR, MR>(panel * PANEL + n, row, out + n);
        finish(out, row, MR, panel * PANEL);
    }

    template <class Codes>
    void run() {
        const int threads = threads_for(M * N * K / 2, (N + PANEL - 1) / PANEL);
#pragma omp parallel for num_threads(threads) if (threads > 1 && M > 1)
        for (int64_t m = 0; m < M; m++) input_bf16 ? take<bf16>(m) : take<float>(m);
        over_panels(threads, N, STREAM_CHUNK, 1, [&](int64_t start, int64_t end, int64_t) {
            for (int64_t p = start; p < end; p++) {
                int64_t row = 0;
                for (; row + MOST_ROWS <= M; row += MOST_ROWS) panel<Codes, 2, MOST_ROWS>(p, row);
                for (; row + 2 <= M; row += 2) panel<Codes, 4, 2>(p, row);
                for (; row < M; row++) panel<Codes, 4, 1>(p, row);
            }
        });
    }
};

thread_local Scratch taken_rows, taken_sums;

}  // namespace

// out [M, N] = input [M, K] · Wᵀ + bias + residual. `kind`: 0 int4, 1 int8, 2 float8. `group` is a multiple of 16, of 32
// for int4.
EXPORT int64_t motet_linear_grouped(const void* input, int64_t input_bf16, int64_t input_stride, const uint8_t* codes,
                                    int64_t kind, const float* scales, const float* shifts, const int32_t* order,
                                    int64_t group, float offset, const float* bias, const void* residual,
                                    int64_t residual_stride, void* out, int64_t out_bf16, int64_t out_stride, int64_t M,
                                    int64_t N, int64_t K) {
    if (M <= 0) return 0;
    const int64_t padded = (K + 31) / 32 * 32, groups = (K + group - 1) / group;
    GroupedProduct product{{input, input_bf16, input_stride, bias, residual, residual_stride, out, out_bf16, out_stride, M, N, K},
                           codes,
                           scales,
                           shifts,
                           order,
                           group,
                           groups,
                           padded,
                           offset,
                           taken_rows.get<float>(M * padded),
                           taken_sums.get<float>(M * groups)};
    if (kind == 0)
        product.run<Int4>();
    else
        kind == 1 ? product.run<Int8>() : product.run<Float8>();
    return 0;
}

REPLAYABLE(motet_linear_grouped)
