// What low-rank adapters add to the rows of a product: out[m] += scale · B (A x[m]), each row with factors of its own.
//
// Rows come in tiles of up to four that have one adapter. An element of A x is a sum of lanes that run over the inputs,
// an output one chain over the ranks: both in an order that depends on the sizes alone, so a row's result is the same
// bits in any tile. Shapes: M rows, K inputs, N outputs, S slots, R ranks that a slot has room for, T tiles.
#include "parallel.h"
#include "parts.h"
#include "replay.h"
#include "simd.h"

namespace {

constexpr int64_t PANEL = 32;  // outputs that lie side by side in `up`
constexpr int64_t RANKS = 4;   // of A, taken in together
constexpr int64_t CHUNK = 8;   // panels that are one piece of work
constexpr int64_t MANY = 8;    // tiles for each thread

struct Tile {
    int32_t slot, first, count;
};

// hidden[i][r] of `ROWS` rows and four ranks; `down` has rows of `width` inputs, a multiple of 16, zeros behind K.
template <int ROWS, typename T>
void shrink(const float* const (&x)[4], const T* down, int64_t inputs, int64_t width, float scale, float* hidden,
            int64_t room) {
    vec sum[ROWS][RANKS];
    for (int i = 0; i < ROWS; i++)
        for (int r = 0; r < RANKS; r++) sum[i][r] = vset(0);
    auto add = [&](const vec(&in)[ROWS], int64_t k) {
        for (int r = 0; r < RANKS; r++) {
            vec weight = vload(down + r * width + k);
            for (int i = 0; i < ROWS; i++) sum[i][r] = fma(in[i], weight, sum[i][r]);
        }
    };
    vec in[ROWS];
    int64_t k = 0;
    for (; k + W <= inputs; k += W) {
        for (int i = 0; i < ROWS; i++) in[i] = vload(x[i] + k);
        add(in, k);
    }
    if (k < inputs) {
        for (int i = 0; i < ROWS; i++) in[i] = vload_part(x[i] + k, inputs - k);
        add(in, k);
    }
    for (int i = 0; i < ROWS; i++)
        for (int r = 0; r < RANKS; r++) hidden[i * room + r] = scale * vsum_lanes(sum[i][r]);
}

// Panels `first` to `last` of `ROWS` rows; `up` has panels of `room` ranks by 32 outputs.
template <int ROWS, typename T>
void expand(float* const (&out)[4], const T* up, const float* hidden, int64_t ranks, int64_t room, int64_t first,
            int64_t last, int64_t outputs) {
    constexpr int VECS = PANEL / W;
    for (int64_t p = first; p < last; p++) {
        const T* panel = up + p * room * PANEL;
        vec sum[ROWS][VECS];
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < VECS; v++) sum[i][v] = vset(0);
        for (int64_t r = 0; r < ranks; r++) {
            vec factor[ROWS];
            for (int i = 0; i < ROWS; i++) factor[i] = vset(hidden[i * room + r]);
            for (int v = 0; v < VECS; v++) {
                vec weight = vload(panel + r * PANEL + v * W);
                for (int i = 0; i < ROWS; i++) sum[i][v] = fma(factor[i], weight, sum[i][v]);
            }
        }
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < VECS; v++) {
                int64_t n = p * PANEL + v * W, left = outputs - n;
                if (left >= W)
                    vstore(out[i] + n, vload(out[i] + n) + sum[i][v]);
                else if (left > 0)
                    vstore_part(out[i] + n, vload_part(out[i] + n, left) + sum[i][v], left);
            }
    }
}

template <typename T>
struct Adapters {
    const float* x;
    int64_t x_stride;
    float* out;
    int64_t out_stride;
    const Tile* tiles;
    int64_t num_tiles;
    const int32_t* rows;
    const T *down, *up;
    const int32_t* ranks;
    const float* scales;
    float* hidden;  // [M, R], by place in `rows`
    int64_t inputs, width, outputs, room;

    void shrink_tile(const Tile& tile, int64_t r) const {
        const float* in[4] = {};
        for (int i = 0; i < tile.count; i++) in[i] = x + rows[tile.first + i] * x_stride;
        const T* from = down + (tile.slot * room + r) * width;
        float *to = hidden + tile.first * room + r, scale = scales[tile.slot];
        switch (tile.count) {
            case 1: return shrink<1>(in, from, inputs, width, scale, to, room);
            case 2: return shrink<2>(in, from, inputs, width, scale, to, room);
            case 3: return shrink<3>(in, from, inputs, width, scale, to, room);
            case 4: return shrink<4>(in, from, inputs, width, scale, to, room);
        }
    }

    void expand_tile(const Tile& tile, int64_t first) const {
        const int64_t panels = (outputs + PANEL - 1) / PANEL, last = std::min(first + CHUNK, panels);
        float* to[4] = {};
        for (int i = 0; i < tile.count; i++) to[i] = out + rows[tile.first + i] * out_stride;
        const T* from = up + tile.slot * panels * PANEL * room;
        const float* factors = hidden + tile.first * room;
        const int64_t ranks_here = ranks[tile.slot];
        switch (tile.count) {
            case 1: return expand<1>(to, from, factors, ranks_here, room, first, last, outputs);
            case 2: return expand<2>(to, from, factors, ranks_here, room, first, last, outputs);
            case 3: return expand<3>(to, from, factors, ranks_here, room, first, last, outputs);
            case 4: return expand<4>(to, from, factors, ranks_here, room, first, last, outputs);
        }
    }

    void run() const {
        int64_t used = 0, work = 0;
        for (; used < num_tiles && tiles[used].count; used++) work += tiles[used].count * ranks[tiles[used].slot];
        const int64_t blocks = room / RANKS, chunks = ((outputs + PANEL - 1) / PANEL + CHUNK - 1) / CHUNK;
        const int threads = threads_for(work * std::min(inputs, outputs), used * std::min(blocks, chunks));
        if (used >= MANY * threads) {  // each tile as a whole: nobody waits for the others between A and B
#pragma omp parallel for num_threads(threads) if (threads > 1)
            for (int64_t t = 0; t < used; t++) {
                for (int64_t r = 0; r < ranks[tiles[t].slot]; r += RANKS) shrink_tile(tiles[t], r);
                if (ranks[tiles[t].slot])
                    for (int64_t c = 0; c < chunks; c++) expand_tile(tiles[t], c * CHUNK);
            }
            return;
        }
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (int64_t i = 0; i < used * blocks; i++) {
                const Tile& tile = tiles[i / blocks];
                const int64_t r = i % blocks * RANKS;
                if (r < ranks[tile.slot]) shrink_tile(tile, r);
            }
#pragma omp for
            for (int64_t i = 0; i < used * chunks; i++)
                if (ranks[tiles[i / chunks].slot]) expand_tile(tiles[i / chunks], i % chunks * CHUNK);
        }
    }
};

}  // namespace

// x [M, K] and out [M, N] float32, rows `*_stride` apart; tiles [T, 3]: slot, first place in `order`, count, a count of 0
// ends them; order: rows by place; down [S, R, width], up [S, panels, R, 32], both bfloat16 if is_bf16; ranks, scales [S].
// 1 if a tile names a slot that is not there or is no tile: nothing has been written then.
EXPORT int64_t motet_lora(const float* x, int64_t x_stride, float* out, int64_t out_stride, const void* tiles,
                          int64_t num_tiles, const int32_t* order, const void* down, const void* up, int64_t is_bf16,
                          const int32_t* ranks, const float* scales, int64_t slots, float* hidden, int64_t num_rows,
                          int64_t inputs, int64_t width, int64_t outputs, int64_t room) {
    const Tile* tile = static_cast<const Tile*>(tiles);
    for (int64_t t = 0; t < num_tiles && tile[t].count; t++) {
        if (tile[t].slot < 0 || tile[t].slot >= slots || tile[t].count < 0 || tile[t].count > 4) return 1;
        if (tile[t].first < 0 || tile[t].first + tile[t].count > num_rows) return 1;
        for (int i = 0; i < tile[t].count; i++)
            if (order[tile[t].first + i] < 0 || order[tile[t].first + i] >= num_rows) return 1;
    }
    auto run = [&](auto kind) {
        using T = decltype(kind);
        const T *a = static_cast<const T*>(down), *b = static_cast<const T*>(up);
        Adapters<T>{x, x_stride, out,    out_stride, tile,   num_tiles, order,   a,
                    b, ranks,    scales, hidden,     inputs, width,     outputs, room}
            .run();
    };
    is_bf16 ? run(bf16{}) : run(float{});
    return 0;
}

REPLAYABLE(motet_lora)
