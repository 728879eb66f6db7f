// What attention works on: the arguments, tiles of lines, where their keys are, and their softmax in progress.
//
// Shapes: those of attention.cpp.
#pragma once

#include <memory>

#include "attention_amx.h"

namespace {

constexpr int SEGMENT = 512;
constexpr int LINES = 128;
constexpr int HEADS = 32;

// As attention.py packs it, 64 bits each.
struct Arguments {
    const void* query_NHD;
    int64_t query_bf16, query_token, query_head;
    const char* key_PKSD;
    int64_t cache_type, key_block, key_head, key_slot;  // 0 float, 1 bfloat16, 2 int8, 3 float8
    const char* value_PKSV;
    int64_t value_block, value_head, value_slot;
    const int32_t* tables_BM;
    int64_t table_stride, table_width;
    const int32_t *starts, *lengths_B;
    int64_t rows, heads, kv_heads, blocks, slots, key_dim, value_dim, window, causal;
    const float* sinks_H;
    void* out_NHV;
    double scale, softcap;

    int64_t group() const { return heads / kv_heads; }
    int64_t cache_bytes() const { return cache_type == 0 ? 4 : cache_type == 1 ? 2 : 1; }
    int64_t queries(int64_t row) const { return starts[row + 1] - starts[row]; }
    // The last key that a query sees.
    int64_t position(int64_t row, int64_t query) const {
        return causal ? lengths_B[row] - queries(row) + query : lengths_B[row] - 1;
    }
    int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
    // Whether products are of pairs of bfloat16 numbers: those of a bfloat16 cache, queries and weights rounded to them.
    bool paired() const { return PAIRED && cache_type == 1 && key_dim % PAIRS == 0 && value_dim % PAIRS == 0; }
    // Values that are the first columns of the keys, as in multi-head latent attention.
    bool shared() const {
        return key_PKSD == value_PKSV && key_block == value_block && key_head == value_head && key_slot == value_slot;
    }
};

int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
// Lines that there is memory for.
int64_t room(int64_t lines) { return AMX ? up(lines, AMX_LINES) : lines; }

// Memory that grows and is kept.
struct Buffer {
    std::unique_ptr<float, void (*)(void*)> memory{nullptr, free};
    int64_t size = 0;

    float* get(int64_t floats) {
        if (floats > size) {
            memory.reset(static_cast<float*>(aligned_alloc(64, up(floats * 4, 64))));
            size = floats;
        }
        return memory.get();
    }
};

// Softmax in progress, per line: the largest score, the sum of exponentials, the sum of values weighted by them.
struct State {
    float *max_L, *sum_L, *out_LVp;

    static int64_t floats(int64_t lines, int64_t vp) { return up(lines, W) * 2 + room(lines) * vp; }
    State(float* at, int64_t lines) : max_L(at), sum_L(at + up(lines, W)), out_LVp(sum_L + up(lines, W)) {}
    State empty(int64_t lines, int64_t vp) const {
        std::fill(max_L, sum_L, -INFINITY);
        std::fill(sum_L, out_LVp + lines * vp, 0.0f);
        return *this;
    }
};

// Some queries of a row with some heads of a group, and the segments that they see. `parts` is where the states of the
// segments are if each is a task of its own, and -1 if one task does them all.
struct Tile {
    const Arguments& a;
    int row, query, query_end, head, num_heads, segment, segment_end;
    int64_t parts = -1;

    int lines() const { return (query_end - query) * num_heads; }
    int64_t vp() const { return up(a.value_dim, W); }
    int64_t position(int line) const { return a.position(row, query + line / num_heads); }
    int64_t end_key() const { return a.position(row, query_end - 1) + 1; }
    int64_t first_key() const { return a.first_key(a.position(row, query)); }
    int64_t first_block(int segment) const { return std::max<int64_t>(segment * SEGMENT, first_key() / KEYS * KEYS); }
    int segments() const { return segment_end - segment; }
    int64_t floats() const { return State::floats(lines(), vp()); }
    State part(float* scratch, int segment) const {
        return State(scratch + parts + (segment - this->segment) * floats(), lines());
    }
};

// Where the keys and values of a block are. Positions that no line of the tile sees point to one that is seen.
struct Rows {
    const char *key[KEYS], *value[KEYS];
    int from, to;

    void locate(const Tile& tile, int64_t base) {
        const Arguments& a = tile.a;
        const int64_t bytes = a.cache_bytes(), kv_head = tile.head / a.group();
        from = int(std::max<int64_t>(0, tile.first_key() - base));
        to = int(std::min<int64_t>(KEYS, tile.end_key() - base));
        const char *keys = a.key_PKSD + kv_head * a.key_head * bytes, *values = a.value_PKSV + kv_head * a.value_head * bytes;
        for (int k = from; k < to;) {
            int64_t block = a.tables_BM[tile.row * a.table_stride + (base + k) / a.slots], slot = (base + k) % a.slots;
            for (; slot < a.slots && k < to; slot++, k++) {
                key[k] = keys + (block * a.key_block + slot * a.key_slot) * bytes;
                value[k] = values + (block * a.value_block + slot * a.value_slot) * bytes;
            }
        }
        for (int k = 0; k < from; k++) key[k] = key[from], value[k] = value[from];
        for (int k = to; k < KEYS; k++) key[k] = key[to - 1], value[k] = value[to - 1];
    }
};

}  // namespace
