// Recurrences over packed rows: every row of tokens advances the state in its slot, token by token.
//
// What a token gets is a function of its row's tokens up to it, down to the bit: a sum runs over vector lanes in
// order and then over the lanes in the order of vsum_each, wherever a row is cut and whoever is in the step. On a CPU
// the token-by-token form is also the fast one, because the state of a head stays in the first-level cache.
//
// Dims that are no whole number of vectors are computed on a padded copy of a head's state.
//
// Shapes: N packed tokens, B rows, P slots; the others at the kernels.
#include <algorithm>
#include <memory>

#include "parallel.h"
#include "simd.h"

namespace {

int64_t up(int64_t x) { return (x + W - 1) / W * W; }

// The packed rows of a step: tokens [starts[b], starts[b + 1]) belong to the state in slots[b].
struct Rows {
    const int64_t *slots_B, *starts;
    int64_t rows;

    int64_t bad_slot(int64_t slots) const {
        for (int64_t b = 0; b < rows; b++)
            if (slots_B[b] < 0 || slots_B[b] >= slots) return b + 1;
        return 0;
    }
    int64_t tokens() const { return starts[rows] - starts[0]; }
};

// Floats for one task, reused by the thread for its next ones.
struct Scratch {
    std::unique_ptr<float[]> data;
    int64_t size = 0;

    float* get(int64_t floats) {
        if (floats > size) data.reset(new float[size = floats]);
        return data.get();
    }
};
thread_local Scratch scratch;

void pad_row(const float* from, int64_t n, float* to) {
    std::copy(from, from + n, to);
    std::fill(to + n, to + up(n), 0.0f);
}

// Runs task(row, part) for all rows and parts, on as many threads as `work` multiply-adds are worth.
template <typename Task>
void for_tasks(const Rows& rows, int64_t parts, int64_t work, const Task& task) {
    const int64_t tasks = rows.rows * parts;
    const int threads = threads_for(work, tasks);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < tasks; i++) task(i / parts, i % parts);
}

// ------------------------------------------------------------------------------------------------------ convolution

// Channels [from, from + n) of a row, n <= W: out[t] = bias + taps[0]·x[t - K + 1] + … + taps[K - 1]·x[t].
struct Conv {
    Rows rows;
    float* state_PKC;
    const float *x, *taps_KC, *bias_C;
    int64_t x_token, channels, taps;
    float* out_NC;

    INLINE vec load(const float* p, int64_t n) {
        if (n == W) return vload(p);
        float lane[W] = {};
        std::copy(p, p + n, lane);
        return vload(lane);
    }

    void row(int64_t row, int64_t part) const {
        constexpr int64_t CHANNELS = 16 * W;
        const int64_t first = part * CHANNELS, end = std::min(channels, first + CHANNELS);
        const int64_t start = rows.starts[row], tokens = rows.starts[row + 1] - start;
        float* state = state_PKC + rows.slots_B[row] * (taps - 1) * channels;
        auto input = [&](int64_t t) { return t < 0 ? state + (t + taps - 1) * channels : x + (start + t) * x_token; };
        for (int64_t t = 0; t < tokens; t++) {
            float* out = out_NC + (start + t) * channels;
            for (int64_t c = first; c < end; c += W) {
                const int64_t n = std::min<int64_t>(W, end - c);
                vec sum = bias_C ? load(bias_C + c, n) : vset(0.0f);
                for (int64_t k = 0; k < taps; k++)
                    sum = fma(load(input(t - taps + 1 + k) + c, n), load(taps_KC + k * channels + c, n), sum);
                if (n == W) {
                    vstore(out + c, sum);
                } else {
                    float lane[W];
                    vstore(lane, sum);
                    std::copy(lane, lane + n, out + c);
                }
            }
        }
        // Sources lie behind their targets or elsewhere, so going up is safe.
        for (int64_t j = 0; j < taps - 1 && tokens > 0; j++)
            std::copy(input(tokens - taps + 1 + j) + first, input(tokens - taps + 1 + j) + end,
                      state + j * channels + first);
    }

    static int64_t parts(int64_t channels) { return (channels + 16 * W - 1) / (16 * W); }
};

// ---------------------------------------------------------------------------------------------------------- Mamba-2

// h ← a·h + dx·Bᵀ, y = h·C for `n` <= W rows of h, `m` a whole number of vectors.
template <bool ALL>
INLINE void outer_rows(float* h, int64_t stride, int64_t n, int64_t m, float a, const float* dx, const float* b,
                       const float* c, float* y) {
    vec sums[W];
    for (int p = 0; p < W; p++) sums[p] = vset(0.0f);
    const vec decay = vset(a);
    for (int64_t i = 0; i < m; i += W) {
        const vec bi = vload(b + i), ci = vload(c + i);
#pragma GCC unroll 16
        for (int p = 0; p < W; p++) {
            if (!ALL && p >= n) break;
            vec value = fma(vset(dx[p]), bi, decay * vload(h + p * stride + i));
            vstore(h + p * stride + i, value);
            sums[p] = fma(value, ci, sums[p]);
        }
    }
    float lane[W];
    vstore(lane, vsum_each(sums));
    std::copy(lane, lane + n, y);
}

// H heads of P rows, G groups that share B and C, M state dim.
struct Mamba2 {
    Rows rows;
    float* state_PHPM;
    const float* x_NHP;
    const float *dt_NH, *a_H, *b_NGM, *c_NGM;
    int64_t x_token, dt_token, b_token, c_token, heads, dim, groups, state_dim;
    float* out_NHP;

    void head(int64_t row, int64_t head) const {
        const int64_t m = up(state_dim), group = head / (heads / groups);
        const bool padded = m != state_dim;
        float* home = state_PHPM + (rows.slots_B[row] * heads + head) * dim * state_dim;
        float* work = scratch.get(2 * m + dim + (padded ? dim * m : 0));
        float *pad_b = work, *pad_c = work + m, *dx = work + 2 * m, *h = padded ? work + 2 * m + dim : home;
        if (padded)
            for (int64_t p = 0; p < dim; p++) pad_row(home + p * state_dim, state_dim, h + p * m);
        for (int64_t t = rows.starts[row]; t < rows.starts[row + 1]; t++) {
            const float *x = x_NHP + t * x_token + head * dim, dt = dt_NH[t * dt_token + head];
            const float *b = b_NGM + t * b_token + group * state_dim, *c = c_NGM + t * c_token + group * state_dim;
            float* y = out_NHP + (t * heads + head) * dim;
            if (padded) {
                pad_row(b, state_dim, pad_b);
                pad_row(c, state_dim, pad_c);
                b = pad_b, c = pad_c;
            }
            for (int64_t p = 0; p < dim; p++) dx[p] = dt * x[p];
            float lane[W];
            vstore(lane, vexp(vset(dt * a_H[head])));
            for (int64_t p = 0; p < dim; p += W) {
                const int64_t n = std::min<int64_t>(W, dim - p);
                if (n == W)
                    outer_rows<true>(h + p * m, m, n, m, lane[0], dx + p, b, c, y + p);
                else
                    outer_rows<false>(h + p * m, m, n, m, lane[0], dx + p, b, c, y + p);
            }
        }
        if (padded)
            for (int64_t p = 0; p < dim; p++) std::copy(h + p * m, h + p * m + state_dim, home + p * state_dim);
    }
};

// ---------------------------------------------------------------------------------------------------------- Mamba-1

// I channels of M numbers each: h ← exp(dt·A)·h + dt·x·B, y = h·C. A task is W channels.
struct Mamba1 {
    Rows rows;
    float* state_PIM;
    const float *x_NI, *dt_NI, *a_IM, *b_NM, *c_NM;
    int64_t x_token, dt_token, b_token, c_token, channels, state_dim;
    float* out_NI;

    void part(int64_t row, int64_t part) const {
        const int64_t m = up(state_dim), first = part * W, n = std::min<int64_t>(W, channels - first);
        const bool padded = m != state_dim;
        float* home = state_PIM + (rows.slots_B[row] * channels + first) * state_dim;
        float* work = scratch.get(2 * m + (padded ? 2 * W * m : 0));
        float *pad_b = work, *pad_c = work + m, *h = padded ? work + 2 * m : home;
        const float* a = a_IM + first * state_dim;
        if (padded) {
            float* pad_a = h + W * m;
            for (int64_t i = 0; i < n; i++) {
                pad_row(home + i * state_dim, state_dim, h + i * m);
                pad_row(a + i * state_dim, state_dim, pad_a + i * m);
            }
            a = pad_a;
        }
        for (int64_t t = rows.starts[row]; t < rows.starts[row + 1]; t++) {
            const float *x = x_NI + t * x_token + first, *dt = dt_NI + t * dt_token + first;
            const float *b = b_NM + t * b_token, *c = c_NM + t * c_token;
            if (padded) {
                pad_row(b, state_dim, pad_b);
                pad_row(c, state_dim, pad_c);
                b = pad_b, c = pad_c;
            }
            vec sums[W];
            for (int i = 0; i < W; i++) sums[i] = vset(0.0f);
            for (int64_t j = 0; j < m; j += W) {
                const vec bj = vload(b + j), cj = vload(c + j);
                for (int64_t i = 0; i < n; i++) {
                    vec decay = vexp(vset(dt[i]) * vload(a + i * m + j));
                    vec value = fma(vset(dt[i] * x[i]), bj, decay * vload(h + i * m + j));
                    vstore(h + i * m + j, value);
                    sums[i] = fma(value, cj, sums[i]);
                }
            }
            float lane[W];
            vstore(lane, vsum_each(sums));
            std::copy(lane, lane + n, out_NI + t * channels + first);
        }
        if (padded)
            for (int64_t i = 0; i < n; i++) std::copy(h + i * m, h + i * m + state_dim, home + i * state_dim);
    }
};

// ------------------------------------------------------------------------------------------------- gated delta rule

// NV vectors of the columns of S, all D rows: S ← α·S + k·(β(v - kᵀα·S))ᵀ, y = qᵀS. `decay` has one α per row of S.
template <int NV>
INLINE void delta_token(float* s, int64_t stride, int64_t dim, const float* q, const float* k, const float* v,
                        const float* decay, float beta, float* y) {
    vec recalled[NV], correction[NV], sums[NV];
    for (int j = 0; j < NV; j++) recalled[j] = sums[j] = vset(0.0f);
    for (int64_t d = 0; d < dim; d++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++)
            recalled[j] = fma(vset(k[d] * decay[d]), vload(s + d * stride + j * W), recalled[j]);
    for (int j = 0; j < NV; j++) correction[j] = vset(beta) * (vload(v + j * W) - recalled[j]);
    for (int64_t d = 0; d < dim; d++)
#pragma GCC unroll 4
        for (int j = 0; j < NV; j++) {
            vec value = fma(vset(k[d]), correction[j], vset(decay[d]) * vload(s + d * stride + j * W));
            vstore(s + d * stride + j * W, value);
            sums[j] = fma(vset(q[d]), value, sums[j]);
        }
    for (int j = 0; j < NV; j++) vstore(y + j * W, sums[j]);
}

// H value heads of a D x V state; every H / K of them share a query and a key. A task is up to four vectors of columns.
struct Delta {
    Rows rows;
    float* state_PHDV;
    const float *q_NKD, *k_NKD, *v_NHV, *decay, *beta_NH;
    int64_t q_token, k_token, v_token, decay_token, beta_token, heads, key_heads, dim, value_dim, decay_per_dim;
    float* out_NHV;

    static constexpr int64_t COLUMNS = 4 * W;
    static int64_t parts(int64_t value_dim) { return (value_dim + COLUMNS - 1) / COLUMNS; }

    void part(int64_t row, int64_t index) const {
        const int64_t head = index / parts(value_dim), column = index % parts(value_dim) * COLUMNS;
        const int64_t n = std::min(COLUMNS, value_dim - column), width = up(n);
        const bool padded = width != n;
        float* home = state_PHDV + (rows.slots_B[row] * heads + head) * dim * value_dim + column;
        float* work = scratch.get(up(dim) + 2 * COLUMNS + (padded ? dim * width : 0));
        float *decays = work, *v = work + up(dim), *y = v + COLUMNS, *s = padded ? y + COLUMNS : home;
        const int64_t stride = padded ? width : value_dim;
        if (padded)
            for (int64_t d = 0; d < dim; d++) pad_row(home + d * value_dim, n, s + d * stride);
        for (int64_t t = rows.starts[row]; t < rows.starts[row + 1]; t++) {
            const int64_t shared = head / (heads / key_heads) * dim;
            alpha(decay + t * decay_token + head * (decay_per_dim ? dim : 1), decays);
            pad_row(v_NHV + t * v_token + head * value_dim + column, n, v);
            const float *q = q_NKD + t * q_token + shared, *k = k_NKD + t * k_token + shared;
            const float beta = beta_NH[t * beta_token + head];
            switch (width / W) {
                case 1: delta_token<1>(s, stride, dim, q, k, v, decays, beta, y); break;
                case 2: delta_token<2>(s, stride, dim, q, k, v, decays, beta, y); break;
                case 3: delta_token<3>(s, stride, dim, q, k, v, decays, beta, y); break;
                default: delta_token<4>(s, stride, dim, q, k, v, decays, beta, y);
            }
            std::copy(y, y + n, out_NHV + (t * heads + head) * value_dim + column);
        }
        if (padded)
            for (int64_t d = 0; d < dim; d++) std::copy(s + d * stride, s + d * stride + n, home + d * value_dim);
    }

    // e to the log decays: of each row of S, or one for all.
    void alpha(const float* logs, float* to) const {
        float lane[W];
        for (int64_t d = 0; d < dim; d += W) {
            const int64_t n = std::min<int64_t>(W, dim - d);
            for (int64_t i = 0; i < n; i++) lane[i] = logs[decay_per_dim ? d + i : 0];
            for (int64_t i = n; i < W; i++) lane[i] = 0.0f;
            vstore(to + d, vexp(vload(lane)));
        }
    }
};

}  // namespace

// All of these return 0, or 1 + b if the slot of row b does not exist; nothing is written then. `*_token` are strides.
EXPORT int64_t motet_conv_scan(float* state_PKC, int64_t slots, const int64_t* slots_B, const int64_t* starts,
                               int64_t rows, const float* x, int64_t x_token, const float* taps_KC,
                               const float* bias_C, int64_t channels, int64_t taps, float* out_NC) {
    Conv conv{{slots_B, starts, rows}, state_PKC, x, taps_KC, bias_C, x_token, channels, taps, out_NC};
    if (int64_t bad = conv.rows.bad_slot(slots)) return bad;
    for_tasks(conv.rows, Conv::parts(channels), conv.rows.tokens() * channels * taps,
              [&](int64_t row, int64_t part) { conv.row(row, part); });
    return 0;
}

EXPORT int64_t motet_mamba2_scan(float* state_PHPM, int64_t slots, const int64_t* slots_B, const int64_t* starts,
                                 int64_t rows, const float* x_NHP, int64_t x_token, const float* dt_NH,
                                 int64_t dt_token, const float* a_H, const float* b_NGM, int64_t b_token,
                                 const float* c_NGM, int64_t c_token, int64_t heads, int64_t dim, int64_t groups,
                                 int64_t state_dim, float* out_NHP) {
    Mamba2 scan{{slots_B, starts, rows}, state_PHPM, x_NHP, dt_NH, a_H, b_NGM, c_NGM, x_token, dt_token, b_token,
                c_token, heads, dim, groups, state_dim, out_NHP};
    if (int64_t bad = scan.rows.bad_slot(slots)) return bad;
    for_tasks(scan.rows, heads, scan.rows.tokens() * heads * dim * state_dim * 2,
              [&](int64_t row, int64_t head) { scan.head(row, head); });
    return 0;
}

EXPORT int64_t motet_mamba1_scan(float* state_PIM, int64_t slots, const int64_t* slots_B, const int64_t* starts,
                                 int64_t rows, const float* x_NI, int64_t x_token, const float* dt_NI,
                                 int64_t dt_token, const float* a_IM, const float* b_NM, int64_t b_token,
                                 const float* c_NM, int64_t c_token, int64_t channels, int64_t state_dim,
                                 float* out_NI) {
    Mamba1 scan{{slots_B, starts, rows}, state_PIM, x_NI, dt_NI, a_IM, b_NM, c_NM, x_token, dt_token, b_token,
                c_token, channels, state_dim, out_NI};
    if (int64_t bad = scan.rows.bad_slot(slots)) return bad;
    for_tasks(scan.rows, (channels + W - 1) / W, scan.rows.tokens() * channels * state_dim * 10,
              [&](int64_t row, int64_t part) { scan.part(row, part); });
    return 0;
}

EXPORT int64_t motet_delta_scan(float* state_PHDV, int64_t slots, const int64_t* slots_B, const int64_t* starts,
                                int64_t rows, const float* q_NKD, int64_t q_token, const float* k_NKD,
                                int64_t k_token, const float* v_NHV, int64_t v_token, const float* decay,
                                int64_t decay_token, int64_t decay_per_dim, const float* beta_NH, int64_t beta_token,
                                int64_t heads, int64_t key_heads, int64_t dim, int64_t value_dim, float* out_NHV) {
    Delta scan{{slots_B, starts, rows}, state_PHDV, q_NKD, k_NKD, v_NHV, decay, beta_NH, q_token, k_token, v_token,
               decay_token, beta_token, heads, key_heads, dim, value_dim, decay_per_dim, out_NHV};
    if (int64_t bad = scan.rows.bad_slot(slots)) return bad;
    for_tasks(scan.rows, heads * Delta::parts(value_dim), scan.rows.tokens() * heads * dim * value_dim * 3,
              [&](int64_t row, int64_t part) { scan.part(row, part); });
    return 0;
}
