// Attention of packed queries, causal or to all keys of their row, over a paged KV cache.
//
// One algorithm serves decode tokens and prefill chunks: the lines of a tile (tokens × heads that share a key/value
// head) walk the keys block by block with an online softmax. What is computed for a line is a function of its
// position (where it is causal), the window and the keys alone, down to the bit:
//   * a block is the KEYS positions from a multiple of KEYS on; a segment is SEGMENT positions with a softmax of its
//     own, and segments are merged in order. A long row is split over threads at segments, or not at all;
//   * a score is summed over D in vector lanes, then over the lanes in the order of vsum_each; values are added to a
//     line's accumulator key by key. Tiles only choose what is done side by side. Beside a bfloat16 cache, where the
//     processor has dot products of two such numbers, queries and weights of keys are rounded to bfloat16, and values are
//     added two keys at a time, from a block's even ones on, or by AMX as attention_amx.h says;
//   * a key that a line does not see is left out, not multiplied by zero: a NaN in it stays where it is. AMX leaves out
//     what is not finite and multiplies the rest.
//
// Shapes: N packed tokens, B rows, M table entries per row, H heads, K key/value heads, P blocks, S slots per block,
// D key dim, V value dim, L lines of a tile; Dp and Vp are D and V padded to whole vectors.
#include <optional>
#include <vector>

#include "attention_parts.h"
#include "codes.h"
#include "parallel.h"
#include "replay.h"

namespace {

template <typename T>
void widen_scaled(const T* from, int64_t dim, float* to, int64_t padded) {
    float scale;
    memcpy(&scale, from + dim, sizeof scale);
    int64_t d = 0;
    for (; d + W <= dim; d += W) vstore(to + d, vload(from + d) * vset(scale));
    for (; d < dim; d++) to[d] = widen(from[d]) * scale;
    std::fill(to + dim, to + padded, 0.0f);
}

template <typename T>
void widen_row(const T* from, int64_t dim, float* to, int64_t padded) {
    int64_t d = 0;
    for (; d + W <= dim; d += W) vstore(to + d, vload(from + d));
    for (; d < dim; d++) to[d] = widen(from[d]);
    std::fill(to + dim, to + padded, 0.0f);
}

// Rows of 8 bits have their scale behind them.
void widen_row(const int8_t* from, int64_t dim, float* to, int64_t padded) { widen_scaled(from, dim, to, padded); }
void widen_row(const fp8* from, int64_t dim, float* to, int64_t padded) { widen_scaled(from, dim, to, padded); }

template <typename T>
void narrow_row(const float* from, int64_t dim, float factor, T* to) {
    int64_t d = 0;
    for (; d + W <= dim; d += W) vstore(to + d, vload(from + d) * vset(factor));
    for (; d < dim; d++) narrow(from[d] * factor, to + d);
}

// One thread's walk over the keys of a tile.
struct Walk {
    const Tile& tile;
    const Arguments& a = tile.a;
    const int lines = tile.lines();
    const int64_t dp = up(a.key_dim, W), vp = tile.vp();
    float *query_LDp, *scores, *decay_L, *wide_keys, *wide_values;
    Range seen_L[LINES];
    Rows now, next;
    const Tile* after;
    std::optional<AmxTiles> configured;

    // `after` is what this thread will likely do next: its first keys are fetched with the last values of this tile.
    explicit Walk(const Tile& tile, const Tile* after = nullptr) : tile(tile), after(after) {
        static thread_local Buffer buffer;
        query_LDp = buffer.get(room(lines) * (dp + KEYS) + 2 * up(lines, W) + KEYS * (dp + vp));
        scores = query_LDp + room(lines) * dp;
        decay_L = scores + room(lines) * KEYS;
        wide_keys = decay_L + up(lines, W);
        wide_values = wide_keys + KEYS * dp;
        for (int l = 0; l < lines; l++) {
            int64_t at = (a.starts[tile.row] + tile.query + l / tile.num_heads) * a.query_token +
                         (tile.head + l % tile.num_heads) * a.query_head;
            float* query = query_LDp + l * dp;
            if (a.paired()) {
                bf16* to = reinterpret_cast<bf16*>(query_LDp) + l * dp;
                if (a.query_bf16)
                    memcpy(to, static_cast<const bf16*>(a.query_NHD) + at, dp * sizeof(bf16));
                else
                    narrow_row(static_cast<const float*>(a.query_NHD) + at, dp, 1.0f, to);
                continue;
            }
            if (a.query_bf16)
                widen_row(static_cast<const bf16*>(a.query_NHD) + at, a.key_dim, query, dp);
            else
                widen_row(static_cast<const float*>(a.query_NHD) + at, a.key_dim, query, dp);
            for (int64_t d = 0; d < dp; d += W) vstore(query + d, vload(query + d) * vset(float(a.scale)));
        }
        if (!tiled()) return;
        configured.emplace();
        for (int l = 0; l < lines; l += AMX_LINES)
            pack_queries(reinterpret_cast<bf16*>(query_LDp) + l * dp, dp, packed_queries() + l * dp);
    }

    // Whether AMX multiplies. What it reads lies where other products keep what they have widened.
    bool tiled() const { return AMX && a.paired(); }
    bf16* packed_queries() const { return reinterpret_cast<bf16*>(wide_keys); }
    bf16* packed_values() const { return reinterpret_cast<bf16*>(wide_values); }

    void segment(int segment, State state) {
        int64_t base = tile.first_block(segment);
        const int64_t end = std::min<int64_t>((segment + 1) * SEGMENT, tile.end_key());
        now.locate(tile, base);
        for (; base < end; base += KEYS) {
            const bool more = base + KEYS < tile.end_key();
            if (more)
                next.locate(tile, base + KEYS);
            else if (after)
                next.locate(*after, after->first_block(after->segment));
            for (int l = 0; l < lines; l++) {
                int64_t position = tile.position(l);
                seen_L[l] = {int(std::max<int64_t>(0, a.first_key(position) - base)),
                             int(std::min<int64_t>(KEYS, position + 1 - base))};
                if (seen_L[l].empty()) seen_L[l] = {KEYS, KEYS};
            }
            block(state, more || after);
            now = next;
        }
    }

    void block(State state, bool fetch) {
        switch (a.cache_type) {
            case 0: return block<float>(state, fetch);
            case 1: return block<bf16>(state, fetch);
            case 2: return block<int8_t>(state, fetch);
            default: return block<fp8>(state, fetch);
        }
    }

    template <typename T>
    void block(State state, bool fetch) {
        const bool whole = a.key_dim == dp && a.value_dim == vp;
        const int64_t value_bytes = a.shared() ? 0 : a.value_dim * sizeof(T), key_bytes = fetch ? a.key_dim * sizeof(T) : 0;
        if (std::is_same_v<T, bf16> && tiled()) return attend_tiled(state, fetch ? value_bytes : 0, key_bytes);
        if constexpr (PAIRED && std::is_same_v<T, bf16>)
            if (a.paired()) return attend<bf16, T>(state, now, value_bytes, key_bytes);
        // A few lines widen what they load in registers; more of them share what was widened once.
        if constexpr (sizeof(T) > 1)
            if (whole && (std::is_same_v<T, float> || lines <= 4))
                return attend<float, T>(state, now, value_bytes, key_bytes);
        Rows wide = now;
        for (int k = now.from; k < now.to; k++) {
            wide.key[k] = wide.value[k] = reinterpret_cast<const char*>(wide_keys + k * dp);
            widen_row(reinterpret_cast<const T*>(now.key[k]), a.key_dim, wide_keys + k * dp, dp);
            if (a.shared()) continue;
            wide.value[k] = reinterpret_cast<const char*>(wide_values + k * vp);
            widen_row(reinterpret_cast<const T*>(now.value[k]), a.value_dim, wide_values + k * vp, vp);
        }
        for (int k = 0; k < KEYS; k++)
            if (k < now.from || k >= now.to) {
                int near = k < now.from ? now.from : now.to - 1;
                wide.key[k] = wide.key[near], wide.value[k] = wide.value[near];
            }
        attend<float, float>(state, wide, 0, key_bytes);
    }

    // Query: the type of queries and of weights, float or, in products of pairs, bf16.
    template <typename Query, typename T>
    void attend(State state, const Rows& rows, int64_t value_bytes, int64_t key_bytes) {
        constexpr bool paired = std::is_same_v<Query, bf16>;
        auto keys = reinterpret_cast<const T* const*>(rows.key), values = reinterpret_cast<const T* const*>(rows.value);
        const Query* query = reinterpret_cast<const Query*>(query_LDp);
        const float scale = paired ? float(a.scale) : 1.0f;
        each_group([&](auto count, int l) {
            score_lines<count>(query + l * dp, dp, keys, seen_L + l, scale, scores + l * KEYS, rows.value,
                               l ? 0 : value_bytes);
        });
        soften(state, paired);
        each_group([&](auto count, int l) {
            value_lines<count>(state.out_LVp + l * vp, vp, decay_L + l, reinterpret_cast<const Query*>(scores + l * KEYS),
                               seen_L + l, values, 0, next.key, l ? 0 : key_bytes);
        });
    }

    // As attend<bf16, bf16>, by AMX, while all of the next block is on its way: this one takes less time than its values.
    void attend_tiled(State state, int64_t value_bytes, int64_t key_bytes) {
        auto keys = reinterpret_cast<const bf16* const*>(now.key), values = reinterpret_cast<const bf16* const*>(now.value);
        BlockFetch fetch{next.key, next.value, key_bytes, value_bytes};
        for (int l = 0; l < lines; l += AMX_LINES) {
            const Range seen = seen_by_group(l);
            amx_scores(packed_queries() + l * dp, dp, keys, seen.from, seen.to, float(a.scale), scores + l * KEYS, fetch);
        }
        soften(state, true);
        for (int l = 0; l < lines; l++) clear_unseen(scores + l * KEYS, seen_L[l]);
        const uint64_t left_out = pack_values(values, vp, packed_values(), fetch);
        for (int l = 0; l < lines; l += AMX_LINES) {
            const Range seen = seen_by_group(l);
            if (seen.empty()) continue;
            const bf16* weights = reinterpret_cast<const bf16*>(scores + l * KEYS);
            std::fill(decay_L + std::min(lines, l + AMX_LINES), decay_L + l + AMX_LINES, 1.0f);
            amx_values(state.out_LVp + l * vp, vp, decay_L + l, weights, packed_values(), seen.from, seen.to, fetch);
            for (uint64_t left = left_out; left; left &= left - 1) {
                const int k = __builtin_ctzll(left);
                for (int i = 0; i < AMX_LINES && l + i < lines; i++)
                    if (seen_L[l + i].from <= k && k < seen_L[l + i].to)
                        add_value(state.out_LVp + (l + i) * vp, vp, weights[i * 2 * KEYS + k], values[k]);
            }
        }
    }

    // The keys that any line of a group sees.
    Range seen_by_group(int l) const {
        Range seen{KEYS, 0};
        for (int i = l; i < std::min(lines, l + AMX_LINES); i++)
            if (!seen_L[i].empty()) seen = {std::min(seen.from, seen_L[i].from), std::max(seen.to, seen_L[i].to)};
        return seen;
    }

    template <typename Function>
    void each_group(Function function) {
        int l = 0;
        for (; l + 4 <= lines; l += 4) function(std::integral_constant<int, 4>(), l);
        for (; l + 2 <= lines; l += 2) function(std::integral_constant<int, 2>(), l);
        for (; l < lines; l++) function(std::integral_constant<int, 1>(), l);
    }

    // Scores to weights against the largest score so far, and by how much what is already summed decays.
    void soften(State state, bool paired) {
        for (int l = 0; l < lines; l++) {
            decay_L[l] = state.max_L[l];
            if (seen_L[l].empty()) continue;
            float max = cap_and_max(scores + l * KEYS, seen_L[l], float(a.softcap));
            state.max_L[l] = max < state.max_L[l] ? state.max_L[l] : max;
        }
        for (int l = 0; l < lines; l += W) vstore(decay_L + l, vexp(vload(decay_L + l) - vload(state.max_L + l)));
        for (int l = 0; l < lines; l++) {
            if (seen_L[l].empty()) {
                decay_L[l] = 1.0f;
                continue;
            }
            state.sum_L[l] = state.sum_L[l] * decay_L[l] + weigh(scores + l * KEYS, seen_L[l], state.max_L[l]);
            if (paired) narrow_weights(scores + l * KEYS, seen_L[l]);
        }
    }
};

// Put what the lines saw in a segment to what they saw before. The first one that a line sees is taken as it is.
void merge(const Tile& tile, int segment, State total, State part) {
    const int64_t vp = tile.vp();
    for (int l = 0; l < tile.lines(); l++) {
        const int64_t position = tile.position(l), first = tile.a.first_key(position) / SEGMENT;
        if (segment < first || segment > position / SEGMENT) continue;
        float *to = total.out_LVp + l * vp, *from = part.out_LVp + l * vp;
        if (segment == first) {
            total.max_L[l] = part.max_L[l], total.sum_L[l] = part.sum_L[l];
            memcpy(to, from, vp * sizeof(float));
            continue;
        }
        float max = std::max(total.max_L[l], part.max_L[l]), both[W] = {total.max_L[l] - max, part.max_L[l] - max};
        vstore(both, vexp(vload(both)));
        total.max_L[l] = max;
        total.sum_L[l] = total.sum_L[l] * both[0] + part.sum_L[l] * both[1];
        for (int64_t v = 0; v < vp; v += W)
            vstore(to + v, fma(vload(from + v), vset(both[1]), vload(to + v) * vset(both[0])));
    }
}

void finish(const Tile& tile, State state) {
    const Arguments& a = tile.a;
    for (int l = 0; l < tile.lines(); l++) {
        const int64_t head = tile.head + l % tile.num_heads, token = a.starts[tile.row] + tile.query + l / tile.num_heads;
        float factor = 1.0f / state.sum_L[l];
        if (a.sinks_H) {
            float sink = a.sinks_H[head], max = std::max(state.max_L[l], sink), both[W] = {state.max_L[l] - max, sink - max};
            vstore(both, vexp(vload(both)));
            factor = both[0] / (state.sum_L[l] * both[0] + both[1]);
        }
        float* out = state.out_LVp + l * tile.vp();
        if (a.paired()) unpair(out, tile.vp());
        const int64_t at = (token * a.heads + head) * a.value_dim;
        if (a.query_bf16)
            narrow_row(out, a.value_dim, factor, static_cast<bf16*>(a.out_NHV) + at);
        else
            narrow_row(out, a.value_dim, factor, static_cast<float*>(a.out_NHV) + at);
    }
}

// A tile from the first segment to the output.
void attend(const Tile& tile, const Tile* after) {
    static thread_local Buffer totals, parts;
    State total = State(totals.get(tile.floats()), tile.lines()).empty(tile.lines(), tile.vp());
    Walk walk(tile, after);
    if (tile.segments() == 1) {
        walk.segment(tile.segment, total);
    } else {
        for (int segment = tile.segment; segment < tile.segment_end; segment++) {
            State part = State(parts.get(tile.floats()), tile.lines()).empty(tile.lines(), tile.vp());
            walk.segment(segment, part);
            merge(tile, segment, total, part);
        }
    }
    finish(tile, total);
}

void merge_parts(const Tile& tile, float* scratch) {
    State total = tile.part(scratch, tile.segment);
    for (int segment = tile.segment + 1; segment < tile.segment_end; segment++)
        merge(tile, segment, total, tile.part(scratch, segment));
    finish(tile, total);
}

// The tiles of all rows, those that see most keys first.
std::vector<Tile> tiles(const Arguments& a) {
    std::vector<Tile> all;
    const int64_t heads = std::min<int64_t>(a.group(), HEADS), queries = std::max<int64_t>(1, LINES / heads);
    for (int64_t row = 0; row < a.rows; row++)
        for (int64_t end = a.queries(row); end > 0; end -= queries)
            for (int64_t group = 0; group < a.heads; group += a.group())
                for (int64_t head = 0; head < a.group(); head += heads) {
                    Tile tile{a,
                              int(row),
                              int(std::max<int64_t>(0, end - queries)),
                              int(end),
                              int(group + head),
                              int(std::min(heads, a.group() - head)),
                              int(a.first_key(a.position(row, std::max<int64_t>(0, end - queries))) / SEGMENT),
                              int(a.position(row, end - 1) / SEGMENT + 1)};
                    all.push_back(tile);
                }
    return all;
}

struct Task {
    int tile, segment;  // -1: all of the tile
};

void run(const Arguments& a) {
    std::vector<Tile> all = tiles(a);
    std::vector<Task> tasks;
    const bool few = int64_t(all.size()) < 2 * omp_get_max_threads();
    int64_t work = 0, scratch_floats = 0;
    for (int i = 0; i < int(all.size()); i++) {
        Tile& tile = all[i];
        work += tile.lines() * (tile.end_key() - tile.first_key()) * (a.key_dim + a.value_dim);
        if (few && tile.segments() > 1) {
            tile.parts = scratch_floats;
            scratch_floats += tile.segments() * tile.floats();
            for (int segment = tile.segment; segment < tile.segment_end; segment++) tasks.push_back({i, segment});
        } else {
            tasks.push_back({i, -1});
        }
    }
    Buffer buffer;
    float* scratch = buffer.get(scratch_floats);
    const int num_tasks = int(tasks.size()), num_tiles = int(all.size()), threads = threads_for(work, num_tasks);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < num_tasks; i++) {
            const Tile& tile = all[tasks[i].tile];
            if (tasks[i].segment < 0)
                attend(tile, i + threads < num_tasks ? &all[tasks[i + threads].tile] : nullptr);
            else
                Walk(tile).segment(tasks[i].segment,
                                   tile.part(scratch, tasks[i].segment).empty(tile.lines(), tile.vp()));
        }
        if (scratch_floats) {
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < num_tiles; i++)
                if (all[i].parts >= 0) merge_parts(all[i], scratch);
        }
    }
}

// 1 + the first row with a table entry, among those that it needs, that is no block; 0 if there is none.
int64_t bad_row(const Arguments& a) {
    for (int64_t row = 0; row < a.rows; row++) {
        if (!a.queries(row)) continue;
        const int64_t first = a.first_key(a.position(row, 0)) / a.slots, last = (a.lengths_B[row] - 1) / a.slots;
        if (last >= a.table_width) return row + 1;
        for (int64_t m = first; m <= last; m++) {
            int32_t block = a.tables_BM[row * a.table_stride + m];
            if (block < 0 || block >= a.blocks) return row + 1;
        }
    }
    return 0;
}

}  // namespace

EXPORT int64_t motet_paged_attention(const void* arguments) {
    const Arguments& a = *static_cast<const Arguments*>(arguments);
    if (int64_t bad = bad_row(a)) return bad;
    run(a);
    return 0;
}

REPLAYABLE(motet_paged_attention)
