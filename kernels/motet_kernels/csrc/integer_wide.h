// int8 weights times many rows where the processor has no dot product of four bytes: weights and input are widened to
// 16 bits once per block, and nothing but a multiply-add of pairs is left to do per row. The sums are those of
// linear_integer.cpp, exactly.
#pragma once

#include "integer.h"

namespace {

#if defined(__AVX512VNNI__)

constexpr int64_t WIDE_ROWS = INT64_MAX;  // dot() is one instruction
void run_wide(IntegerProduct&) {}

#else

constexpr int64_t WIDE_ROWS = 48;         // fewer wait for the weights from memory
constexpr int64_t WIDE_BLOCK = 96;        // words of k: 24 KB of a panel's weights, most of a first-level cache
constexpr int64_t WIDE_INPUT = 1 << 16;   // words of input that stay in a second-level cache

// Sums of MR rows and NV vectors of columns over `words` words of k, begun in `sums` [MR][PANEL].
// weights [words][2][PANEL], input [words][2][MR]: pairs of 16 bits, k and k + 2 before k + 1 and k + 3.
template <int MR>
void wide_tile(const int32_t* weights, const int32_t* input, int64_t words, int32_t* sums) {
    word sum[MR * NV];
    UNROLL for (int i = 0; i < MR * NV; i++) sum[i] = wload(sums + i / NV * PANEL + i % NV * W);
    for (int64_t k = 0; k < 2 * words; k++, weights += PANEL, input += MR) {
        word w[NV];
        UNROLL for (int v = 0; v < NV; v++) w[v] = wload(weights + v * W);
        UNROLL for (int m = 0; m < MR; m++) {
            word x = wset(input[m]);
            PIN(x);
            UNROLL for (int v = 0; v < NV; v++) sum[m * NV + v] = pairs(sum[m * NV + v], w[v], x);
        }
    }
    UNROLL for (int i = 0; i < MR * NV; i++) wstore(sums + i / NV * PANEL + i % NV * W, sum[i]);
}

using WideTile = void (*)(const int32_t*, const int32_t*, int64_t, int32_t*);

template <int... I>
WideTile wide_tile_for(int rows, std::integer_sequence<int, I...>) {
    static constexpr WideTile tiles[] = {wide_tile<I + 1>...};
    return tiles[rows - 1];
}

struct Wide {
    const IntegerProduct& product;
    Tiles tiles;
    int32_t* input;  // [tiles][words][2][rows]

    // A tile of the input as `pack` has left it, its bytes as 16 bits with their signs.
    void widen_input(int64_t tile) const {
        const int64_t row = tiles.start(tile), rows = tiles.size(tile);
        const int32_t* from = product.packed + row * product.words;
        int32_t* to = input + 2 * row * product.words;
        for (int64_t k = 0; k < product.words; k++, from += rows, to += 2 * rows)
            for (int64_t m = 0; m < rows; m++) {
                int8_t x[4];
                memcpy(x, from + m, 4);
                to[m] = int32_t(uint16_t(x[0]) | uint32_t(uint16_t(x[2])) << 16);
                to[rows + m] = int32_t(uint16_t(x[1]) | uint32_t(uint16_t(x[3])) << 16);
            }
    }

    // The panel's columns of the rows of tiles first.. to last.
    void panel(int64_t panel, int64_t first, int64_t last) const {
        const int64_t begin = tiles.start(first), rows = tiles.start(last) - begin, words = product.words;
        int32_t* sums = wide_sums.get<int32_t>(rows * PANEL);
        alignas(64) int32_t weights[WIDE_BLOCK * 2 * PANEL];
        for (int64_t m = 0; m < rows; m++)
            std::fill(sums + m * PANEL, sums + (m + 1) * PANEL, -128 * product.row_sums[begin + m]);
        for (int64_t k = 0; k < words; k += WIDE_BLOCK) {
            const int64_t count = std::min(WIDE_BLOCK, words - k);
            const uint8_t* from = product.weights + (panel * words + k) * PANEL * 4;
            for (int64_t i = 0; i < count; i++)
                for (int v = 0; v < PANEL / W; v++) {
                    word w = wload(from + i * PANEL * 4 + v * W * 4);
                    wstore(weights + 2 * i * PANEL + v * W, even(w));
                    wstore(weights + (2 * i + 1) * PANEL + v * W, odd(w));
                }
            for (int64_t t = first; t < last; t++) {
                const int size = tiles.size(t);
                const int64_t row = tiles.start(t);
                WideTile tile = wide_tile_for(size, std::make_integer_sequence<int, MAX_ROWS>());
                for (int part = 0; part < PARTS; part++)
                    tile(weights + part * NV * W, input + 2 * (row * words + k * size), count,
                         sums + (row - begin) * PANEL + part * NV * W);
            }
        }
        finish(panel, begin, rows, sums);
    }

  private:
    void finish(int64_t panel, int64_t begin, int64_t rows, const int32_t* sums) const {
        alignas(64) float out[PANEL];
        for (int64_t m = 0; m < rows; m++) {
            for (int n = 0; n < PANEL; n += W) {
                vstore(out + n, product.scaled(wload(sums + m * PANEL + n), begin + m, panel * PANEL + n));
            }
            product.finish(out, begin + m, 1, panel * PANEL);
        }
    }

    static thread_local Scratch wide_sums;

  public:
    static thread_local Scratch wide_input;
};

thread_local Scratch Wide::wide_sums, Wide::wide_input;

void run_wide(IntegerProduct& product) {
    const Tiles tiles(product.M, MAX_ROWS);
    const Wide wide{product, tiles, Wide::wide_input.get<int32_t>(product.M * product.words * 2)};
    const int threads = threads_for(product.M * product.N * product.K / 2, (product.N + PANEL - 1) / PANEL);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tiles.count; t++) {
        product.pack(tiles.start(t), tiles.size(t));
        wide.widen_input(t);
    }
    const int64_t most = std::max<int64_t>(2, WIDE_INPUT / (2 * product.words * MAX_ROWS));
    const int64_t groups = (tiles.count + most - 1) / most;
    over_panels(threads, product.N, 1, groups, [&](int64_t start, int64_t end, int64_t group) {
        for (int64_t panel = start; panel < end; panel++)
            wide.panel(panel, tiles.count * group / groups, tiles.count * (group + 1) / groups);
    });
}

#endif

}  // namespace
