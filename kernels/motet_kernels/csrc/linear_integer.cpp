// x · Wᵀ for int8 and int4 weights: the input is rounded to int8 on the way in, products are summed exactly in int32.
//
// int8: one scale per column of weights and one per row of the input. Packed [N/32][K/4][32][4], each byte w + 128.
// int4: one scale per group of 32 weights of a column, one per group of 32 of an input row. A group of a panel is 576
// bytes: [4][32][4] bytes that hold w + 8 of k = 4t + i in the low half and of k = 16 + 4t + i in the high one, then 32
// scales in bfloat16.
// Groups are added up from the first to the last: a row has the same bits in every batch. K is padded with zeros.
#include "amx.h"
#include "integer.h"
#include "integer_wide.h"
#include "replay.h"

namespace {

// One tile of rows times NP panels side by side: out [NP][MR][PANEL]. A panel alone fetches parts of the `next` one
// side by side, as in linear_float.cpp.
struct Int8 {
    static constexpr int64_t STEP = PANEL * 4;  // bytes of one word of k in a panel
    static constexpr int ROWS = MAX_ROWS;

    template <int MR, int NP>
    static void tile(const IntegerProduct& product, int64_t panel, int part, int64_t row, bool next, float* out) {
        constexpr int NA = NP * NV;
        const int64_t panel_bytes = product.words * STEP;
        const uint8_t* weights = product.weights + panel * panel_bytes + part * NV * W * 4;
        const uint8_t* ahead = weights + (next ? panel_bytes : 0);
        const int32_t* input = product.packed + row * product.words;
        word sum[MR * NA];
        UNROLL for (int i = 0; i < MR * NA; i++) sum[i] = wset(-128 * product.row_sums[row + i / NA]);
        for (int64_t k = 0; k < product.words; k++, weights += STEP, input += MR) {
            UNROLL for (int p = 0; p < NP; p++) {
                const uint8_t* at = weights + p * panel_bytes;
                UNROLL for (int line = 0; line < 2; line++) {
                    const uint8_t* quarter = ahead + (k % 2 * 2 + line) * (product.words * STEP / 4) + k / 2 * 64;
                    __builtin_prefetch(NP > 1 ? at + 4096 + line * 64 : quarter, 0, 2);
                    __builtin_prefetch(at + 1024 + line * 64);
                }
                word w[NV];
                UNROLL for (int v = 0; v < NV; v++) w[v] = wload(at + v * W * 4);
                UNROLL for (int m = 0; m < MR; m++) {
                    word x = wset(input[m]);
                    PIN(x);
                    UNROLL for (int v = 0; v < NV; v++) {
                        word& s = sum[m * NA + p * NV + v];
                        s = dot(s, w[v], x);
                    }
                }
            }
        }
        UNROLL for (int i = 0; i < MR * NA; i++) {
            const int m = i / NA, p = i % NA / NV, column = (part * NV + i % NV) * W;
            vstore(out + (p * MR + m) * PANEL + column, product.scaled(sum[i], row + m, (panel + p) * PANEL + column));
        }
    }
};

struct Int4 {
    static constexpr int64_t STEP = 576;  // bytes of one group in a panel
    static constexpr int ROWS = W == 16 ? 6 : 3;  // a float and an integer accumulator per row and vector

    template <int MR, int NP>
    static void tile(const IntegerProduct& product, int64_t panel, int part, int64_t row, bool next, float* out) {
        constexpr int NA = NP * NV;
        const int64_t panel_bytes = product.groups * STEP;
        const uint8_t* weights = product.weights + panel * panel_bytes + part * NV * W * 4;
        const uint8_t* ahead = weights + (next ? panel_bytes : 0);
        const bf16* scales = reinterpret_cast<const bf16*>(product.weights + panel * panel_bytes + 512) + part * NV * W;
        const int32_t* input = product.packed + row * product.words;
        const float* row_scales = product.row_scales + row * product.groups;
        const int32_t* row_sums = product.row_sums + row * product.groups;
        vec total[MR * NA];
        UNROLL for (int i = 0; i < MR * NA; i++) total[i] = vset(0.0f);
        for (int64_t g = 0; g < product.groups; g++) {
            UNROLL for (int p = 0; p < NP; p++) {
                const uint8_t* at = weights + p * panel_bytes;
                UNROLL for (int line = 0; line < STEP / 64; line++) {
                    const uint8_t* ninth = ahead + (line * product.groups + g) * 64;
                    __builtin_prefetch(NP > 1 ? at + 4096 + line * 64 : ninth, 0, 2);
                    __builtin_prefetch(at + 1024 + line * 64);
                }
                word sum[MR * NV];
                UNROLL for (int i = 0; i < MR * NV; i++) sum[i] = wset(0);
                UNROLL for (int t = 0; t < 4; t++) {
                    UNROLL for (int half = 0; half < 2; half++) {
                        word w[NV];
                        UNROLL for (int v = 0; v < NV; v++) {
                            word both = wload(at + t * PANEL * 4 + v * W * 4);
                            w[v] = half ? high_nibbles(both) : low_nibbles(both);
                        }
                        UNROLL for (int m = 0; m < MR; m++) {
                            word x = wset(input[(half * 4 + t) * MR + m]);
                            PIN(x);
                            UNROLL for (int v = 0; v < NV; v++) sum[m * NV + v] = gather(sum[m * NV + v], w[v], x);
                        }
                    }
                }
                UNROLL for (int i = 0; i < MR * NV; i++) {
                    vec scale = vload(scales + p * (panel_bytes / 2) + i % NV * W) * vset(row_scales[i / NV]);
                    vec& s = total[i / NV * NA + p * NV + i % NV];
                    s = fma(to_float(wadd(gathered(sum[i]), wset(-8 * row_sums[i / NV]))), scale, s);
                }
            }
            weights += STEP;
            scales += STEP / 2;
            input += 8 * MR;
            row_scales += MR;
            row_sums += MR;
        }
        UNROLL for (int i = 0; i < MR * NA; i++)
            vstore(out + (i % NA / NV * MR + i / NA) * PANEL + (part * NV + i % NV) * W, total[i]);
    }
};

using Tile = void (*)(const IntegerProduct&, int64_t, int, int64_t, bool, float*);

constexpr int side_by_side(int rows) { return rows == 1 ? 2 : 1; }

template <class Format, int... I>
Tile tile_for(int rows, bool single, std::integer_sequence<int, I...>) {
    static constexpr Tile several[] = {Format::template tile<I + 1, side_by_side(I + 1)>...};
    static constexpr Tile one[] = {Format::template tile<I + 1, 1>...};
    return (single ? one : several)[rows - 1];
}

// int8 by AMX: the sums of Int8, exactly.
void run_tiled(const IntegerProduct& product) {
    const int64_t panels = (product.N + PANEL - 1) / PANEL;
    const int threads = threads_for(product.M * product.N * product.K / 4, panels);
    const AmxProduct<AmxBytes, int32_t, 1> whole{product.weights, reinterpret_cast<char*>(product.packed), product.M,
                                                 product.words, panels, 0};
    auto pack = [&](int64_t row, char* to) { product.pack_row(row, to); };
    whole.run(threads, pack, [&](const int32_t* sums, int64_t row, int count, int64_t panel) {
        alignas(64) float out[AMX_PAIR * PANEL];
        for (int m = 0; m < count; m++)
            for (int n = 0; n < PANEL; n += W) {
                const word sum = wadd(wload(sums + m * PANEL + n), wset(-128 * product.row_sums[row + m]));
                vstore(out + m * PANEL + n, product.scaled(sum, row + m, panel * PANEL + n));
            }
        product.finish(out, row, count, panel * PANEL);
    });
}

template <class Format>
void run(IntegerProduct& product) {
    const Tiles tiles(product.M, Format::ROWS);
    const int threads = threads_for(product.M * product.N * product.K / 4, (product.N + PANEL - 1) / PANEL);
#pragma omp parallel for num_threads(threads) if (threads > 1 && tiles.count > 1)
    for (int64_t t = 0; t < tiles.count; t++) product.pack(tiles.start(t), tiles.size(t));
    const int wide = tiles.count == 1 ? side_by_side(int(product.M)) : 1;
    over_panels(threads, product.N, STREAM_CHUNK, 1, [&](int64_t start, int64_t end, int64_t) {
        alignas(64) float out[2 * MAX_ROWS * PANEL];
        for (int64_t panel = start, taken; panel < end; panel += taken) {
            taken = wide <= end - panel ? wide : 1;
            for (int64_t t = 0; t < tiles.count; t++) {
                const int rows = tiles.size(t);
                Tile tile = tile_for<Format>(rows, taken == 1, std::make_integer_sequence<int, Format::ROWS>());
                const bool next = t == 0 && panel + 1 < end;
                for (int part = 0; part < PARTS; part++) tile(product, panel, part, tiles.start(t), next, out);
                for (int64_t p = 0; p < taken; p++)
                    product.finish(out + p * rows * PANEL, tiles.start(t), rows, (panel + p) * PANEL);
            }
        }
    });
}

}  // namespace

// out [M, N] = input [M, K] · Wᵀ + bias + residual, the input rounded to int8. `scales` of columns make the weights
// int8, a null pointer int4.
EXPORT int64_t motet_linear_integer(const void* input, int64_t input_bf16, int64_t input_stride, const uint8_t* weights,
                                    const float* scales, const float* bias, const void* residual,
                                    int64_t residual_stride, void* out, int64_t out_bf16, int64_t out_stride, int64_t M,
                                    int64_t N, int64_t K) {
    if (M <= 0) return 0;
    const int64_t groups = scales ? 1 : (K + 31) / 32;
    const int64_t words = scales ? (K + 3) / 4 : groups * 8;
    IntegerProduct product{{input, input_bf16, input_stride, bias, residual, residual_stride, out, out_bf16, out_stride, M, N, K},
                           weights,
                           scales,
                           words,
                           groups,
                           IntegerProduct::packed_words.get<int32_t>(std::max(M * words, amx_packed(M, words))),
                           IntegerProduct::packed_scales.get<float>(M * groups),
                           IntegerProduct::packed_sums.get<int32_t>(M * groups)};
    if (scales && AMX)
        run_tiled(product);
    else if (scales && M > WIDE_ROWS)
        run_wide(product);
    else
        scales ? run<Int8>(product) : run<Int4>(product);
    return 0;
}

REPLAYABLE(motet_linear_integer)
