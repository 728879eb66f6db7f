// 1-D convolution of float32 steps with dense channels, without padding, by Toom-Cook's algorithm (Winograd 1980; Lavin
// and Gray 2016): a tile of four outputs and four taps costs 7 products instead of 16.
//
// Taps are in S groups of four. Tile r = (q, i) of a convolution with dilation d is the outputs base(r) + d · (0..3),
// base(r) = 4 d q + i for i < d; its inputs for group s are those of tile r + s d for group 0. So the transformed inputs
// V [POINTS][tiles + (S - 1) d][C] are shared by the groups, and each point is a matrix product with S C inputs per
// output. With one point nothing is transformed: a plain convolution of S taps, a tile per output.
//
// Transformed weights: [POINTS][O/32][S C][32], O padded with zeros.
#include "parallel.h"
#include "simd.h"

#define UNROLL _Pragma("GCC unroll 64")

namespace {

constexpr int POINTS = 7, OUTPUTS = 4;
constexpr int PANEL = 32, COLUMNS = 2 * W;  // columns of a panel, and of a tile in registers
constexpr int MOST_ROWS = W == 16 ? 12 : W == 8 ? 6 : 4;
constexpr int CHUNK = 48;  // tiles of a task, whose products stay in the first-level cache

// Points 0, 1, -1, 2, -2, 1/2 and infinity; rows are scaled so that the largest factors are small.
constexpr float INPUT[POINTS][POINTS] = {
    {-2, 4, 2.5f, -5, -0.5f, 1, 0},
    {0, 2, -2, -4.5f, 0.5f, 1, 0},
    {0, -2, 6, -3.5f, -1.5f, 1, 0},
    {0, 0.5f, -0.75f, -1, 0.75f, 0.5f, 0},
    {0, -0.5f, 1.25f, 0, -1.25f, 0.5f, 0},
    {0, 4, 0, -5, 0, 1, 0},
    {0, -2, 4, 2.5f, -5, -0.5f, 1},
};
constexpr float OUTPUT[OUTPUTS][POINTS] = {
    {1, 1, 1, 1, 1, 1, 0},
    {0, 1, -1, 2, -2, 0.5f, 0},
    {0, 1, 1, 4, 4, 0.25f, 0},
    {0, 1, -1, 8, -8, 0.125f, 1},
};

// Steps of `width` numbers in two pieces. Steps of an absent piece and beyond both are zeros, a null pointer.
struct Rows {
    const float* before;
    int64_t before_count;
    const float* rest;
    int64_t rest_count, width;

    const float* at(int64_t row) const {
        if (row < before_count) return before ? before + row * width : nullptr;
        row -= before_count;
        return row < rest_count ? rest + row * width : nullptr;
    }
};

struct Conv {
    Rows x, residual;
    const float *weights, *bias;
    float *out, *v;
    int64_t steps, channels, outputs, groups, dilation, tiles, v_rows;
    float slope;
    int64_t base(int64_t tile, int size) const { return tile / dilation * size * dilation + tile % dilation; }
};

INLINE vec active(vec x, vec slope) { return vselect_less(x, vset(0.0f), x * slope, x); }

// One row of V for all points, from the inputs of one tile.
template <int P>
void transform(const Conv& c, int64_t tile) {
    const int64_t first = c.base(tile, P == 1 ? 1 : OUTPUTS), C = c.channels;
    const float* from[P];
    for (int j = 0; j < P; j++) from[j] = c.x.at(first + j * c.dilation);
    float* to = c.v + tile * C;
    const int64_t point = c.v_rows * C;
    const vec slope = vset(c.slope);
    auto column = [&](auto load, auto store, int64_t k) {
        vec x[P];
        UNROLL for (int j = 0; j < P; j++) x[j] = from[j] ? active(load(from[j] + k), slope) : vset(0.0f);
        if constexpr (P == 1) {
            store(to + k, x[0]);
        } else {
            UNROLL for (int p = 0; p < P; p++) {
                vec sum = vset(0.0f);
                UNROLL for (int j = 0; j < P; j++)
                    if (INPUT[p][j] != 0) sum = fma(vset(INPUT[p][j]), x[j], sum);
                store(to + p * point + k, sum);
            }
        }
    };
    int64_t k = 0;
    for (; k + W <= C; k += W)
        column([](const float* p) { return vload(p); }, [](float* p, vec x) { vstore(p, x); }, k);
    if (const int64_t left = C - k; left > 0)
        column(
            [left](const float* p) {
                alignas(64) float lanes[W] = {};
                memcpy(lanes, p, left * 4);
                return vload(lanes);
            },
            [left](float* p, vec x) {
                alignas(64) float lanes[W];
                vstore(lanes, x);
                memcpy(p, lanes, left * 4);
            },
            k);
}

// MR tiles of one point times COLUMNS columns of a panel.
template <int MR>
void product(const Conv& c, const float* v, const float* weights, float* to) {
    vec sum[MR][2];
    UNROLL for (int i = 0; i < MR; i++) sum[i][0] = sum[i][1] = vset(0.0f);
    const int64_t C = c.channels;
    for (int64_t s = 0; s < c.groups; s++, v += c.dilation * C)
        for (int64_t k = 0; k < C; k++, weights += PANEL) {
            const vec left = vload(weights), right = vload(weights + W);
            UNROLL for (int i = 0; i < MR; i++) {
                const vec x = vset(v[i * C + k]);
                sum[i][0] = fma(x, left, sum[i][0]);
                sum[i][1] = fma(x, right, sum[i][1]);
            }
        }
    UNROLL for (int i = 0; i < MR; i++) {
        vstore(to + i * COLUMNS, sum[i][0]);
        vstore(to + i * COLUMNS + W, sum[i][1]);
    }
}

template <int MR = 1>
void products(int rows, const Conv& c, const float* v, const float* weights, float* to) {
    if (rows == MR) return product<MR>(c, v, weights, to);
    if constexpr (MR < MOST_ROWS) products<MR + 1>(rows, c, v, weights, to);
}

// The outputs of the tiles [begin, end) in the columns from `column` on.
template <int P>
void task(const Conv& c, int64_t begin, int64_t end, int64_t column) {
    constexpr int Y = P == 1 ? 1 : OUTPUTS;
    alignas(64) float m[P][CHUNK * COLUMNS];
    const int64_t depth = c.groups * c.channels, panels = (c.outputs + PANEL - 1) / PANEL, count = end - begin;
    const int64_t blocks = (count + MOST_ROWS - 1) / MOST_ROWS;
    for (int p = 0; p < P; p++) {
        const float* weights = c.weights + (p * panels + column / PANEL) * depth * PANEL + column % PANEL;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t from = count * block / blocks, to = count * (block + 1) / blocks;
            const float* v = c.v + (p * c.v_rows + begin + from) * c.channels;
            products(int(to - from), c, v, weights, m[p] + from * COLUMNS);
        }
    }
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t first = c.base(tile, Y);
        for (int half = 0; half < 2; half++) {
            const int64_t o = column + half * W, left = c.outputs - o;
            if (left <= 0) break;
            vec y[Y];
            UNROLL for (int i = 0; i < Y; i++) y[i] = vset(0.0f);
            UNROLL for (int p = 0; p < P; p++) {
                const vec one = vload(m[p] + (tile - begin) * COLUMNS + half * W);
                UNROLL for (int i = 0; i < Y; i++) {
                    if constexpr (P == 1) y[i] = one;
                    else if (OUTPUT[i][p] != 0) y[i] = fma(vset(OUTPUT[i][p]), one, y[i]);
                }
            }
            UNROLL for (int i = 0; i < Y; i++) {
                const int64_t step = first + i * c.dilation;
                if (step >= c.steps) break;
                const float* residual = c.residual.at(step);
                float* out = c.out + step * c.outputs + o;
                if (left >= W) {
                    vec sum = y[i];
                    if (c.bias) sum = sum + vload(c.bias + o);
                    if (residual) sum = sum + vload(residual + o);
                    vstore(out, sum);
                } else {
                    float lanes[W];
                    vstore(lanes, y[i]);
                    for (int64_t lane = 0; lane < left; lane++)
                        out[lane] = lanes[lane] + (c.bias ? c.bias[o + lane] : 0.0f) +
                                    (residual ? residual[o + lane] : 0.0f);
                }
            }
        }
    }
}

template <int P>
void run(const Conv& c) {
    const int64_t chunks = (c.tiles + CHUNK - 1) / CHUNK, columns = (c.outputs + COLUMNS - 1) / COLUMNS;
    const int64_t work = P * c.tiles * c.groups * c.channels * columns * COLUMNS;
    const int threads = threads_for(work, chunks * columns);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t tile = 0; tile < c.v_rows; tile++) transform<P>(c, tile);
#pragma omp for schedule(dynamic) nowait
        for (int64_t index = 0; index < chunks * columns; index++) {
            const int64_t chunk = index / columns, begin = c.tiles * chunk / chunks;
            task<P>(c, begin, c.tiles * (chunk + 1) / chunks, index % columns * COLUMNS);
        }
    }
}

}  // namespace

// out [steps, outputs] of `before` (null: zeros), x, and zeros after it; the residual likewise, and the bias may be null.
// Scratch v is [points, tiles + (groups - 1) · dilation, channels], `tiles` as many as begin before `steps`.
EXPORT int64_t motet_conv(const float* before, int64_t before_rows, const float* x, int64_t rows, const float* weights,
                          const float* bias, const float* residual_before, int64_t residual_before_rows,
                          const float* residual, int64_t residual_rows, float* out, float* v, int64_t steps,
                          int64_t channels, int64_t outputs, int64_t groups, int64_t dilation, int64_t tiles,
                          int64_t points, float slope) {
    const Conv c{{before, before_rows, x, rows, channels},
                 {residual_before, residual_before_rows, residual, residual_rows, outputs},
                 weights, bias, out, v, steps, channels, outputs, groups, dilation,
                 tiles, tiles + (groups - 1) * dilation, slope};
    if (points == 1) run<1>(c);
    else run<POINTS>(c);
    return 0;
}
