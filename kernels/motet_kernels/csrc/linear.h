// What the matrix products share: panels of weights, tiles of rows, the scratch they are packed into, the last step.
//
// Weights lie in panels of 32 columns (output features), within a panel by k (input features). Rows of the input are
// taken in tiles of up to MAX_ROWS, packed by k, so that a tile and a panel are both read front to back.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "parallel.h"
#include "simd.h"

constexpr int PANEL = 32;
constexpr int NV = 2;                     // vectors of columns that a tile keeps in registers
constexpr int PARTS = PANEL / (NV * W);   // tiles side by side in a panel
constexpr int MAX_ROWS = W == 16 ? 14 : 6;  // NV · rows accumulators, NV weights and one input fill the registers
constexpr int64_t STREAM_CHUNK = 64;      // most panels that a thread takes at a time where weights stream by

#define UNROLL _Pragma("GCC unroll 32")

// Keeps a broadcast next to its use: hoisted, it would cost a register that an accumulator needs.
#if defined(__AVX512F__)
#define PIN(x) asm volatile("" : "+v"(x))
#else
#define PIN(x) asm volatile("" : "+x"(x))
#endif

// Past the caches, for what is larger than they are: the lines written are not read first.
#if defined(__AVX512F__)
INLINE void vstream(float* p, vec x) { _mm512_stream_ps(p, x); }
INLINE void stream_fence() { _mm_sfence(); }
#elif defined(__AVX2__)
INLINE void vstream(float* p, vec x) { _mm256_stream_ps(p, x); }
INLINE void stream_fence() { _mm_sfence(); }
#else
INLINE void vstream(float* p, vec x) { vstore(p, x); }
INLINE void stream_fence() {}
#endif
INLINE void vstream(bf16* p, vec x) { vstore(p, x); }

// A buffer that is kept and grows: one per calling thread and use.
struct Scratch {
    char* data = nullptr;
    size_t size = 0;

    template <typename T>
    T* get(int64_t count) {
        constexpr size_t huge = size_t(2) << 20;
        size_t bytes = size_t(count) * sizeof(T);
        if (bytes > size) {
            free(data);
            size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
            if (size > huge) size = (size + huge - 1) / huge * huge;
            data = static_cast<char*>(aligned_alloc(size >= huge ? huge : 4096, size));
            if (!data) abort();
#ifdef MADV_HUGEPAGE
            if (size >= huge) madvise(data, size, MADV_HUGEPAGE);
#endif
        }
        return reinterpret_cast<T*>(data);
    }
    ~Scratch() { free(data); }
};

// W numbers of each of `rows` rows, to [W][rows], or to lines `line` apart.
template <typename T>
void transpose(const T* from, int64_t stride, int rows, float* to, int64_t line = 0) {
    if (line == 0) line = rows;
#if defined(__AVX512F__)
    vec row[16], pair[16];
    UNROLL for (int m = 0; m < 16; m++) row[m] = m < rows ? vload(from + m * stride) : vset(0.0f);
    UNROLL for (int i = 0; i < 8; i++) {
        pair[i] = _mm512_unpacklo_ps(row[2 * i], row[2 * i + 1]);
        pair[i + 8] = _mm512_unpackhi_ps(row[2 * i], row[2 * i + 1]);
    }
    // Lane 4j + i of the 128-bit parts: number 4l + j of rows 4i .. 4i + 3 in part l.
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int half = 0; half < 2; half++) {
            __m512d low = _mm512_castps_pd(pair[half * 8 + 2 * i]), high = _mm512_castps_pd(pair[half * 8 + 2 * i + 1]);
            row[half * 8 + i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            row[half * 8 + 4 + i] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    const __mmask16 some = __mmask16((1u << rows) - 1);
    UNROLL for (int j = 0; j < 4; j++) {
        vec a = _mm512_shuffle_f32x4(row[4 * j], row[4 * j + 1], 0x88), b = _mm512_shuffle_f32x4(row[4 * j], row[4 * j + 1], 0xdd);
        vec c = _mm512_shuffle_f32x4(row[4 * j + 2], row[4 * j + 3], 0x88);
        vec d = _mm512_shuffle_f32x4(row[4 * j + 2], row[4 * j + 3], 0xdd);
        _mm512_mask_storeu_ps(to + j * line, some, _mm512_shuffle_f32x4(a, c, 0x88));
        _mm512_mask_storeu_ps(to + (j + 4) * line, some, _mm512_shuffle_f32x4(b, d, 0x88));
        _mm512_mask_storeu_ps(to + (j + 8) * line, some, _mm512_shuffle_f32x4(a, c, 0xdd));
        _mm512_mask_storeu_ps(to + (j + 12) * line, some, _mm512_shuffle_f32x4(b, d, 0xdd));
    }
#else
    for (int m = 0; m < rows; m++)
        for (int k = 0; k < W; k++) to[k * line + m] = widen(from[m * stride + k]);
#endif
}

// M rows in tiles whose sizes differ by one at most.
struct Tiles {
    int64_t rows, count;

    Tiles(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
    int64_t start(int64_t tile) const { return rows / count * tile + std::min(tile, rows % count); }
    int size(int64_t tile) const { return int(start(tile + 1) - start(tile)); }
};

// Input and output of a product, float32 or bfloat16. Strides in elements between rows.
struct Product {
    const void* input;
    int64_t input_bf16, input_stride;
    const float* bias;  // or null
    const void* residual;  // added last, of the output's type; or null
    int64_t residual_stride;
    void* out;
    int64_t out_bf16, out_stride;
    int64_t M, N, K;

    // Whether the output is better written past the caches: whole lines, and more of them than a cache holds.
    bool streams() const {
        return !out_bf16 && M * N >= 1 << 18 && reinterpret_cast<uintptr_t>(out) % 64 == 0 && out_stride % 16 == 0;
    }

    // Columns `column`.. of `rows` rows from `values` [rows][PANEL]: add bias and residual, round once, write.
    void finish(const float* values, int64_t row, int rows, int64_t column) const {
        if (out_bf16)
            write(values, row, rows, column, static_cast<bf16*>(out), static_cast<const bf16*>(residual));
        else
            write(values, row, rows, column, static_cast<float*>(out), static_cast<const float*>(residual));
    }

    // Leaves `rows` rows from `row` on, for matrix `e` of several.
    void narrow_to(int64_t row, int64_t rows, int64_t e) {
        input = static_cast<const char*>(input) + row * input_stride * (input_bf16 ? 2 : 4);
        if (residual) residual = static_cast<const char*>(residual) + row * residual_stride * (out_bf16 ? 2 : 4);
        out = static_cast<char*>(out) + row * out_stride * (out_bf16 ? 2 : 4);
        if (bias) bias += e * N;
        M = rows;
    }

  private:
    template <typename T>
    void write(const float* values, int64_t row, int rows, int64_t column, T* to, const T* add) const {
        const int columns = int(std::min<int64_t>(PANEL, N - column));
        const bool past = streams();
        for (int m = 0; m < rows; m++, values += PANEL) {
            T* line = to + (row + m) * out_stride + column;
            const T* more = add ? add + (row + m) * residual_stride + column : nullptr;
            int n = 0;
            for (; n + W <= columns; n += W) {
                vec x = vload(values + n);
                if (bias) x = x + vload(bias + column + n);
                if (more) x = x + vload(more + n);
                past ? vstream(line + n, x) : vstore(line + n, x);
            }
            for (; n < columns; n++) {
                float x = values[n];
                if (bias) x += bias[column + n];
                if (more) x += widen(more[n]);
                narrow(x, line + n);
            }
        }
    }
};

// f(first panel, last, group) over all panels of N columns, once per group, in pieces that idle threads take: of `most`
// panels, or fewer where every thread would not get two.
template <typename F>
void over_panels(int threads, int64_t N, int64_t most, int64_t groups, F&& f) {
    const int64_t panels = (N + PANEL - 1) / PANEL;
    const int64_t length = std::max<int64_t>(1, std::min(most, panels * groups / (2 * threads)));
    const int64_t pieces = (panels + length - 1) / length;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < pieces * groups; i++) {
        const int64_t start = i % pieces * length;
        f(start, std::min(start + length, panels), i / pieces);
        stream_fence();
    }
}

// Matrices of one shape, each with rows of its own: rows starts[e] to starts[e + 1] are for matrix e. Without `starts`,
// all rows are for one matrix.
struct Experts {
    const int64_t* starts;
    int64_t count;

    // Computes `whole`, which has the input of all rows: `split(product, e, row)` moves a copy, whose rows begin at `row`,
    // to matrix e and sets its tiles; these are packed, then compute(product, first panel, last) is called for all panels. Threads take pieces of at most `most` panels of any matrix.
    template <class P, class Split, class Compute>
    void run(const P& whole, int64_t most, Split&& split, Compute&& compute) const {
        static thread_local std::vector<P> kept;
        static thread_local std::vector<std::pair<int64_t, int64_t>> kept_tiles;
        std::vector<P>& products = kept;
        std::vector<std::pair<int64_t, int64_t>>& tiles = kept_tiles;
        products.clear();
        tiles.clear();
        for (int64_t e = 0; e < (starts ? count : 1); e++) {
            const int64_t row = starts ? starts[e] : 0, end = starts ? starts[e + 1] : whole.M;
            if (row >= end) continue;
            products.push_back(whole);
            products.back().narrow_to(row, end - row, e);
            split(products.back(), e, row);
            for (int64_t t = 0; t < products.back().tiles.count; t++) tiles.push_back({int64_t(products.size()) - 1, t});
        }
        const int64_t panels = (whole.N + PANEL - 1) / PANEL, active = int64_t(products.size()), all = int64_t(tiles.size());
        const int threads = threads_for(whole.M * whole.N * whole.K / 4, panels * active);
        const int64_t length = std::max<int64_t>(1, std::min(most, panels * active / (2 * threads)));
        const int64_t pieces = (panels + length - 1) / length;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < all; i++) products[tiles[i].first].pack(tiles[i].second);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < pieces * active; i++) {
                const int64_t start = i % pieces * length;
                compute(products[i / pieces], start, std::min(start + length, panels));
                stream_fence();
            }
        }
    }
};
