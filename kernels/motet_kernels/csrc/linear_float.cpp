// x · Wᵀ for float32 and bfloat16 weights, summed in float32. Beside bfloat16 weights the input is rounded to bfloat16.
//
// Every output is one chain of fused multiply-adds over k from 0 upwards, or of dot products of two where the processor
// has them for bfloat16, whatever the number of rows and wherever a tile ends: the same bits for a row alone, in a batch
// and in a prompt.
//
// Packed weights: [N/32][K/2][2][32] float32, or [N/32][K/2][32][2] bfloat16, that is, 32-bit words that hold k and
// k + 1 of a column. N and K are padded with zeros.
#include "amx.h"
#include "gates.h"
#include "linear.h"
#include "replay.h"

namespace {

// A format of weights, and of the input that is packed for it. STEPS multiply-adds take in a pair of k; input and
// weights of a step are vectors of 32 bits per lane, a column each.
struct Float32 {
    static constexpr int64_t PAIR = 2 * PANEL * 4;  // bytes of one pair of k in a panel
    static constexpr int STEPS = 2;
    static constexpr bool WIDEN = false;  // whether weights that many rows share are better widened once
    static constexpr bool TILED = false;  // whether AMX multiplies
    INLINE vec weight(const char* at, int v, int step) {
        return vload(reinterpret_cast<const float*>(at) + step * PANEL + v * W);
    }
    INLINE vec add(vec sum, vec w, vec x) { return fma(w, x, sum); }

    // W numbers of k of each row to [W][rows].
    template <typename T>
    INLINE void pack(const T* from, int64_t stride, int rows, float* to) { transpose(from, stride, rows, to); }
    INLINE float round(float x) { return x; }
};

#if defined(__AVX512BF16__)

struct Bfloat16 {
    static constexpr int64_t PAIR = 2 * PANEL * 2;
    static constexpr int STEPS = 1;  // words of k and k + 1, of weights and input alike
    static constexpr bool WIDEN = false, TILED = AMX;
    INLINE vec weight(const char* at, int v, int) { return vload(reinterpret_cast<const float*>(at) + v * W); }
    INLINE vec add(vec sum, vec w, vec x) { return dot_pairs(sum, w, x); }
};

#else

struct Bfloat16 {
    static constexpr int64_t PAIR = 2 * PANEL * 2;
    static constexpr int STEPS = 2;
    static constexpr bool WIDEN = true, TILED = false;
    INLINE vec weight(const char* at, int v, int step) { return step ? odd(at, v) : even(at, v); }
    INLINE vec add(vec sum, vec w, vec x) { return fma(w, x, sum); }

    template <typename T>
    INLINE void pack(const T* from, int64_t stride, int rows, float* to) {
        alignas(64) bf16 rounded[MAX_ROWS * W];
        for (int m = 0; m < rows; m++) vstore(rounded + m * W, vload(from + m * stride));
        transpose(rounded, W, rows, to);
    }
    INLINE float round(float x) {
        bf16 rounded;
        narrow(x, &rounded);
        return widen(rounded);
    }

  private:
#if defined(__AVX512F__)
    INLINE vec even(const char* at, int v) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(at + v * W * 4), 16));
    }
    INLINE vec odd(const char* at, int v) {
        const __m512i high = _mm512_set1_epi32(int(0xffff0000));
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(at + v * W * 4), high));
    }
#elif defined(__AVX2__)
    INLINE __m256i word(const char* at, int v) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + v * W * 4));
    }
    INLINE vec even(const char* at, int v) { return _mm256_castsi256_ps(_mm256_slli_epi32(word(at, v), 16)); }
    INLINE vec odd(const char* at, int v) {
        return _mm256_castsi256_ps(_mm256_and_si256(word(at, v), _mm256_set1_epi32(int(0xffff0000))));
    }
#else
    INLINE ivec word(const char* at, int v) {
        ivec x;
        memcpy(&x, at + v * W * 4, sizeof x);
        return x;
    }
    INLINE vec even(const char* at, int v) { return (vec)(word(at, v) << 16); }
    INLINE vec odd(const char* at, int v) { return (vec)(word(at, v) & int(0xffff0000)); }
#endif
};

#endif

// A tile of MR rows, `input` [pairs][STEPS][MR], times the columns of NP panels: `out` [NP][MR][PANEL], resumed or begun.
// STEP bytes per pair are fetched from `ahead` on into the second-level cache. Of weights that STREAM by, `ahead` is the
// place in the same panel that comes next, or, for a panel alone, the next panel: a core reads faster from several
// places than from one, so its quarters are fetched side by side.
template <class Format, int MR, int NP, int STEP, bool STREAM>
void tile(const char* weights, int64_t panel_stride, const char* ahead, const float* input, int64_t pairs, float* out,
          bool resume) {
    constexpr int NA = NP * NV, LINES = STEP / 64, TURNS = LINES < 4 ? 4 / LINES : 1;
    vec sum[MR * NA];
    auto target = [=](int i) { return out + (i % NA / NV * MR + i / NA) * PANEL + i % NV * W; };
    UNROLL for (int i = 0; i < MR * NA; i++) sum[i] = vset(0.0f);
    if (resume) {
        UNROLL for (int i = 0; i < MR * NA; i++) sum[i] = vload(target(i));
    }
    for (int64_t k = 0; k < pairs; k++) {
        UNROLL for (int p = 0; p < NP; p++) {
            const char* at = weights + p * panel_stride;
            UNROLL for (int line = 0; line < LINES; line++) {
                int64_t place = k * STEP + line * 64;
                if (STREAM && NP == 1) place = (k % TURNS * LINES + line) * (pairs * STEP / 4) + k / TURNS * 64;
                __builtin_prefetch(ahead + p * panel_stride + place, 0, 2);
                if (STREAM) __builtin_prefetch(at + 1024 + line * 64);
            }
            UNROLL for (int step = 0; step < Format::STEPS; step++) {
                vec w[NV];
                UNROLL for (int v = 0; v < NV; v++) w[v] = Format::weight(at, v, step);
                UNROLL for (int m = 0; m < MR; m++) {
                    vec x = vset(input[step * MR + m]);
                    PIN(x);
                    UNROLL for (int v = 0; v < NV; v++) {
                        vec& s = sum[m * NA + p * NV + v];
                        s = Format::add(s, w[v], x);
                    }
                }
            }
        }
        weights += Format::PAIR;
        input += Format::STEPS * MR;
    }
    UNROLL for (int i = 0; i < MR * NA; i++) vstore(target(i), sum[i]);
}

using Tile = void (*)(const char*, int64_t, const char*, const float*, int64_t, float*, bool);

// Few rows, up to four tiles: the weights are used as they stream by. Panels side by side where the
// accumulators of one are too few to hide the latency of an addition.
constexpr int STREAM_ROWS = W == 16 ? 12 : 5;
constexpr int side_by_side(int rows) {
    if (W == 16) return rows <= 2 ? 4 : rows <= 4 ? 2 : 1;
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

template <class Format, int... I>
Tile stream_tile(int rows, bool single, std::integer_sequence<int, I...>) {
    static constexpr Tile several[] = {tile<Format, I + 1, side_by_side(I + 1), Format::PAIR, true>...};
    static constexpr Tile one[] = {tile<Format, I + 1, 1, Format::PAIR, true>...};
    return (single ? one : several)[rows - 1];
}

// Many rows: a block of weights is kept in the cache, widened if need be, and the next one is fetched meanwhile.
constexpr int64_t BLOCK = 128;            // pairs of k: 32 KB of float32, most of a first-level cache
constexpr int64_t BLOCK_CHUNK = 4;        // panels whose output is written together
constexpr int64_t BLOCK_INPUT = 1 << 19;  // floats of input that stay in a second-level cache

template <class Format, class Kept, int... I>
Tile block_tile(int rows, bool only, std::integer_sequence<int, I...>) {
    static constexpr Tile first[] = {tile<Kept, I + 1, 1, Format::PAIR, false>...};
    static constexpr Tile shared[] = {tile<Kept, I + 1, 1, 64, false>...};
    return (only ? first : shared)[rows - 1];
}

struct FloatProduct : Product {
    const char* weights;
    int64_t pairs;
    float* packed;  // the input's tiles, [pairs][STEPS][rows] each, or those of amx.h
    int64_t biases = 0;  // numbers in `bias`, where outputs are activated

    // Words of 32 bits of the packed input.
    int64_t packed_size() const { return std::max(2 * M * pairs, amx_packed(M, pairs)); }

    template <class Format, typename T>
    void pack(int64_t row, int rows) const {
        const T* from = static_cast<const T*>(input) + row * input_stride;
        float* to = packed + row * Format::STEPS * pairs;
        int64_t k = 0;
        if constexpr (Format::STEPS == 2) {
            for (; k + W <= K; k += W) Format::pack(from + k, input_stride, rows, to + k * rows);
            for (; k < K; k++)
                for (int m = 0; m < rows; m++) to[k * rows + m] = Format::round(widen(from[m * input_stride + k]));
            for (int m = 0; m < rows && K % 2; m++) to[K * rows + m] = 0;
        } else {
            alignas(64) bf16 words[MAX_ROWS * 2 * W];
            for (; k + 2 * W <= K; k += 2 * W) {
                for (int m = 0; m < rows; m++) {
                    vstore_operand(words + m * 2 * W, vload(from + m * input_stride + k));
                    vstore_operand(words + m * 2 * W + W, vload(from + m * input_stride + k + W));
                }
                transpose(reinterpret_cast<const float*>(words), W, rows, to + k / 2 * rows);
            }
            for (; k < K; k += 2)
                for (int m = 0; m < rows; m++) {
                    bf16 pair[2] = {};
                    narrow(widen(from[m * input_stride + k]), pair);
                    if (k + 1 < K) narrow(widen(from[m * input_stride + k + 1]), pair + 1);
                    memcpy(to + k / 2 * rows + m, pair, sizeof pair);
                }
        }
    }

    template <class Format>
    void pack(int64_t row, int rows) const {
        input_bf16 ? pack<Format, bf16>(row, rows) : pack<Format, float>(row, rows);
    }

    template <class Format>
    void stream(int64_t start, int64_t end, const Tiles& tiles) const {
        constexpr int64_t DISTANCE = 4096;
        const int64_t panel_bytes = pairs * Format::PAIR;
        const int64_t several = tiles.count == 1 ? side_by_side(int(M)) : 1;
        alignas(64) float out[4 * MAX_ROWS * PANEL];
        for (int64_t panel = start, taken; panel < end; panel += taken) {
            taken = several <= end - panel ? several : 1;
            for (int64_t t = 0; t < tiles.count; t++) {
                const int64_t row = tiles.start(t), rows = tiles.size(t);
                Tile run = stream_tile<Format>(int(rows), taken == 1, std::make_integer_sequence<int, STREAM_ROWS>());
                for (int part = 0; part < PARTS; part++) {
                    const char* at = weights + panel * panel_bytes + part * NV * W * 4;
                    const bool fetched = t > 0 || panel + 1 == end;
                    const char* ahead = taken > 1 ? at + DISTANCE : fetched ? at : at + panel_bytes;
                    run(at, panel_bytes, ahead, packed + row * Format::STEPS * pairs, pairs, out + part * NV * W, false);
                }
                for (int64_t p = 0; p < taken; p++)
                    finish(out + p * rows * PANEL, row, int(rows), (panel + p) * PANEL);
            }
        }
    }

    // Rows of tiles first.. to last times panels start.. to end: each row of the output is written in one go.
    template <class Format>
    void block(int64_t start, int64_t end, const Tiles& tiles, int64_t first, int64_t last) const {
        const int64_t row = tiles.start(first), rows = tiles.start(last) - row;
        float* out = block_out.get<float>(rows * PANEL * BLOCK_CHUNK);
        for (int64_t panel = start; panel < end; panel++)
            for (int64_t k = 0; k < pairs; k += BLOCK)
                step<Format>(panel, k, std::min(BLOCK, pairs - k), tiles, first, last, out + (panel - start) * rows * PANEL);
        for (int64_t m = 0; m < rows; m++)
            for (int64_t panel = start; panel < end; panel++)
                finish(out + ((panel - start) * rows + m) * PANEL, row + m, 1, panel * PANEL);
    }

    // As `block`, of activated outputs: of GATED ones panel p is the gate of what panel p + N / PANEL holds.
    template <class Format, vec (*F)(vec), bool GATED>
    void activated_block(int64_t start, int64_t end, const Tiles& tiles, int64_t first, int64_t last) const {
        constexpr int64_t SETS = GATED ? 2 : 1;
        const int64_t row = tiles.start(first), rows = tiles.start(last) - row;
        float* out = block_out.get<float>(rows * PANEL * BLOCK_CHUNK * SETS);
        const Product plain = unbiased();
        for (int64_t panel = start; panel < end; panel++)
            for (int64_t set = 0; set < SETS; set++)
                for (int64_t k = 0; k < pairs; k += BLOCK)
                    step<Format>(panel + set * N / PANEL, k, std::min(BLOCK, pairs - k), tiles, first, last,
                                 out + ((panel - start) * SETS + set) * rows * PANEL);
        for (int64_t m = 0; m < rows; m++)
            for (int64_t panel = start; panel < end; panel++) {
                float* values = out + ((panel - start) * SETS * rows + m) * PANEL;
                activate<F, GATED>(values, values + rows * PANEL, panel * PANEL);
                plain.finish(values, row + m, 1, panel * PANEL);
            }
    }

    Product unbiased() const {
        Product plain = *this;
        plain.bias = nullptr;
        return plain;
    }

    // The activation of PANEL outputs from `column` on, times what `more` has of GATED ones.
    template <vec (*F)(vec), bool GATED>
    void activate(float* values, const float* more, int64_t column) const {
        for (int n = 0; n < PANEL; n += W, column += W) {
            vec x = vload(values + n);
            if (bias) x = x + bias_at(column);
            x = F(x);
            if constexpr (GATED) {
                vec up = vload(more + n);
                x = x * (bias ? up + bias_at(N + column) : up);
            }
            vstore(values + n, x);
        }
    }

    vec bias_at(int64_t column) const { return column + W <= biases ? vload(bias + column) : partial_bias(column); }
    vec partial_bias(int64_t column) const {
        float lane[W] = {};
        for (int64_t n = column; n < biases; n++) lane[n - column] = bias[n];
        return vload(lane);
    }

    template <class Format>
    void step(int64_t panel, int64_t k, int64_t count, const Tiles& tiles, int64_t first, int64_t last, float* out) const {
        using Kept = std::conditional_t<Format::WIDEN, Float32, Format>;
        alignas(64) float wide[Format::WIDEN ? BLOCK * 2 * PANEL : 1];
        const char* from = weights + (panel * pairs + k) * Format::PAIR;
        const char *next = from + count * Format::PAIR, *block = from;
        if constexpr (Format::WIDEN) {
            block = reinterpret_cast<const char*>(wide);
            for (int64_t i = 0; i < 2 * count; i++)
                for (int v = 0; v < PANEL / W; v++)
                    vstore(wide + i * PANEL + v * W, Format::weight(from + i / 2 * Format::PAIR, v, i % 2));
        }
        for (int64_t t = first; t < last; t++) {
            const int rows = tiles.size(t);
            const int64_t row = tiles.start(t), share = (t - first) * count * 64;
            const char* ahead = share < count * Format::PAIR ? next + share : block;
            Tile run = block_tile<Format, Kept>(rows, last - first == 1, std::make_integer_sequence<int, MAX_ROWS>());
            for (int part = 0; part < PARTS; part++)
                run(block + part * NV * W * 4, 0, ahead, packed + (row * pairs + k * rows) * Format::STEPS, count,
                    out + (row - tiles.start(first)) * PANEL + part * NV * W, k > 0);
        }
    }

    template <class Format>
    void run() const {
        const int threads = threads_for(M * N * K, (N + PANEL - 1) / PANEL);
        if constexpr (Format::TILED) {
            run_tiled<1>(threads, [&](const float* sums, int64_t row, int count, int64_t panel) {
                finish(sums, row, count, panel * PANEL);
            });
            return;
        }
        if (M <= 4 * STREAM_ROWS) {
            const Tiles few(M, STREAM_ROWS);
            for (int64_t t = 0; t < few.count; t++) pack<Format>(few.start(t), few.size(t));
            over_panels(threads, N, STREAM_CHUNK, 1,
                        [&](int64_t start, int64_t end, int64_t) { stream<Format>(start, end, few); });
            return;
        }
        over_blocks<Format>(threads, [&](auto... where) { block<Format>(where...); });
    }

    template <class Format, vec (*F)(vec), bool GATED>
    void run_activated() const {
        const int threads = threads_for(M * N * K, (N + PANEL - 1) / PANEL);
        if constexpr (Format::TILED) {
            const Product plain = unbiased();
            run_tiled<GATED ? 2 : 1>(threads, [&](float* sums, int64_t row, int count, int64_t panel) {
                const float* more = sums + AMX_PAIR * PANEL;
                for (int m = 0; m < count; m++)
                    activate<F, GATED>(sums + m * PANEL, more + m * PANEL, panel * PANEL);
                plain.finish(sums, row, count, panel * PANEL);
            });
            return;
        }
        over_blocks<Format>(threads, [&](auto... where) { activated_block<Format, F, GATED>(where...); });
    }

    // By AMX, for each of SETS sets of N columns.
    template <int SETS, typename Done>
    void run_tiled(int threads, Done&& done) const {
        const AmxProduct<AmxPairs, float, SETS> whole{weights, reinterpret_cast<char*>(packed), M, pairs,
                                                      (N + PANEL - 1) / PANEL, N / PANEL};
        auto pack = [&](int64_t row, char* to) {
            const int64_t at = row * input_stride;
            if (input_bf16) amx_pack_row(static_cast<const bf16*>(input) + at, K, to);
            else amx_pack_row(static_cast<const float*>(input) + at, K, to);
        };
        whole.run(threads, pack, done);
    }

    // Pack the input, and call compute(first panel, end panel, tiles, first tile, end tile) for all blocks of the output.
    template <class Format, typename Compute>
    void over_blocks(int threads, Compute&& compute) const {
        const Tiles tiles(M, MAX_ROWS);
        const int64_t most = std::max<int64_t>(2, BLOCK_INPUT / (Format::STEPS * pairs * MAX_ROWS));
        const int64_t groups = (tiles.count + most - 1) / most;
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t t = 0; t < tiles.count; t++) pack<Format>(tiles.start(t), tiles.size(t));
        over_panels(threads, N, BLOCK_CHUNK, groups, [&](int64_t start, int64_t end, int64_t group) {
            compute(start, end, tiles, tiles.count * group / groups, tiles.count * (group + 1) / groups);
        });
    }

    static thread_local Scratch packed_input, block_out;
};

thread_local Scratch FloatProduct::packed_input, FloatProduct::block_out;

}  // namespace

// out [M, N] = input [M, K] · Wᵀ + bias + residual, summed in float32 and rounded once to the output's type.
EXPORT int64_t motet_linear_float(const void* input, int64_t input_bf16, int64_t input_stride, const void* weights,
                                  int64_t weights_bf16, const float* bias, const void* residual, int64_t residual_stride,
                                  void* out, int64_t out_bf16, int64_t out_stride, int64_t M, int64_t N, int64_t K) {
    if (M <= 0) return 0;
    FloatProduct product{{input, input_bf16, input_stride, bias, residual, residual_stride, out, out_bf16, out_stride, M, N, K},
                         static_cast<const char*>(weights),
                         (K + 1) / 2,
                         nullptr};
    product.packed = FloatProduct::packed_input.get<float>(product.packed_size());
    weights_bf16 ? product.run<Bfloat16>() : product.run<Float32>();
    return 0;
}

// out [M, N] = activation(input [M, K] · Wᵀ + bias), rounded once; kind 0 is SiLU, 1 GELU by tanh, 2 GELU. If `gated`, of
// gate and up, [2 N, K] in `weights`, and N is a multiple of PANEL: activation(gate) · up. Bits are those of the product
// in float32 and the kernels of gates.cpp. For many rows.
EXPORT int64_t motet_linear_activated(const void* input, int64_t input_bf16, int64_t input_stride, const void* weights,
                                      int64_t weights_bf16, const float* bias, void* out, int64_t out_bf16,
                                      int64_t out_stride, int64_t M, int64_t N, int64_t K, int64_t kind, int64_t gated) {
    if (M <= 0) return 0;
    FloatProduct product{{input, input_bf16, input_stride, bias, nullptr, 0, out, out_bf16, out_stride, M, N, K},
                         static_cast<const char*>(weights),
                         (K + 1) / 2,
                         nullptr,
                         gated ? 2 * N : N};
    product.packed = FloatProduct::packed_input.get<float>(product.packed_size());
    auto run = [&](auto format) {
        using Format = decltype(format);
        if (gated)
            kind == 0 ? product.run_activated<Format, silu, true>() : product.run_activated<Format, gelu_tanh, true>();
        else if (kind == 0)
            product.run_activated<Format, silu, false>();
        else if (kind == 1)
            product.run_activated<Format, gelu_tanh, false>();
        else
            product.run_activated<Format, gelu, false>();
    };
    weights_bf16 ? run(Bfloat16()) : run(Float32());
    return 0;
}

// out [M, heads, N] = input [M, heads, K] · Wᵀ with a W for each head: `weights` holds their panels one head after the
// other, N padded to whole panels. Strides in elements between rows and between heads.
EXPORT int64_t motet_linear_heads(const void* input, int64_t input_bf16, int64_t input_stride, int64_t input_head,
                                  const void* weights, int64_t weights_bf16, void* out, int64_t out_bf16,
                                  int64_t out_stride, int64_t out_head, int64_t M, int64_t heads, int64_t N, int64_t K) {
    if (M <= 0) return 0;
    const int64_t pairs = (K + 1) / 2, panels = (N + PANEL - 1) / PANEL;
    const int64_t head_bytes = panels * pairs * (weights_bf16 ? Bfloat16::PAIR : Float32::PAIR);
    auto at = [](const void* from, int64_t elements, int64_t is_bf16) {
        return static_cast<char*>(const_cast<void*>(from)) + elements * (is_bf16 ? 2 : 4);
    };
    const int threads = threads_for(M * heads * N * K, heads);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < heads; h++) {
        FloatProduct product{{at(input, h * input_head, input_bf16), input_bf16, input_stride, nullptr, nullptr, 0,
                              at(out, h * out_head, out_bf16), out_bf16, out_stride, M, N, K},
                             static_cast<const char*>(weights) + h * head_bytes,
                             pairs,
                             nullptr};
        product.packed = FloatProduct::packed_input.get<float>(product.packed_size());
        weights_bf16 ? product.run<Bfloat16>() : product.run<Float32>();
    }
    return 0;
}

// out [count, K] float32: rows of the weights. Both halves of a word are wanted, a word of a panel every 128 bytes.
EXPORT int64_t motet_linear_rows(const void* weights, int64_t weights_bf16, const int64_t* ids, float* out, int64_t count,
                                 int64_t K) {
    const int64_t pairs = (K + 1) / 2;
    const int threads = threads_for(count * K * 4, count);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) {
        const int64_t panel = ids[i] / PANEL, column = ids[i] % PANEL;
        float* to = out + i * K;
        if (weights_bf16) {
            const bf16* from = static_cast<const bf16*>(weights) + panel * pairs * 2 * PANEL + column * 2;
            for (int64_t k = 0; k < K; k++) to[k] = widen(from[k / 2 * 2 * PANEL + k % 2]);
        } else {
            const float* from = static_cast<const float*>(weights) + panel * pairs * 2 * PANEL + column;
            for (int64_t k = 0; k < K; k++) to[k] = from[k * PANEL];
        }
    }
    return 0;
}

REPLAYABLE(motet_linear_float)
REPLAYABLE(motet_linear_activated)
