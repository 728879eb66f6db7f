// Storing keys or values in the pages of a paged cache. A row of 8 bits has its scale, a float, behind it.
//
// Shapes: N packed tokens, K key/value heads, D dim, P blocks, S slots per block.
#include "codes.h"
#include "parallel.h"
#include "replay.h"

namespace {

constexpr int64_t NO_SLOT = -1;

template <typename From, typename To>
void copy(const From* from, To* to, int64_t dim) {
    int64_t d = 0;
    for (; d + W <= dim; d += W) vstore(to + d, vload(from + d));
    for (; d < dim; d++) narrow(widen(from[d]), to + d);
}

template <typename From>
void copy(const From* from, int8_t* to, int64_t dim) {
    int32_t sum;
    const float scale = quantize(from, dim, to, &sum);
    memcpy(to + dim, &scale, sizeof scale);
}

template <typename From>
void copy(const From* from, fp8* to, int64_t dim) {
    const float scale = quantize(from, dim, to);
    memcpy(to + dim, &scale, sizeof scale);
}

// As kv.py packs it, 64 bits each. cache_type: 0 float, 1 bfloat16, 2 int8, 3 float8.
struct Store {
    const void* rows_NKD;
    int64_t rows_bf16, row_stride, head_stride, dim;
    void* cache_PKSD;
    int64_t cache_type, block_stride, cache_head_stride, slot_stride;

    template <typename From, typename To>
    void token(int64_t n, int64_t block, int64_t offset, int64_t heads) const {
        const From* from = static_cast<const From*>(rows_NKD) + n * row_stride;
        To* to = static_cast<To*>(cache_PKSD) + block * block_stride + offset * slot_stride;
        for (int64_t k = 0; k < heads; k++) copy(from + k * head_stride, to + k * cache_head_stride, dim);
    }

    template <typename From>
    void token(int64_t n, int64_t block, int64_t offset, int64_t heads) const {
        switch (cache_type) {
            case 0: return token<From, float>(n, block, offset, heads);
            case 1: return token<From, bf16>(n, block, offset, heads);
            case 2: return token<From, int8_t>(n, block, offset, heads);
            default: return token<From, fp8>(n, block, offset, heads);
        }
    }

    void token(int64_t n, int64_t block, int64_t offset, int64_t heads) const {
        rows_bf16 ? token<bf16>(n, block, offset, heads) : token<float>(n, block, offset, heads);
    }
};

}  // namespace

// `count` stores, of keys and of values, with the same heads and slots: token n goes to slot slots_N[n] =
// block · S + offset, or nowhere if that is NO_SLOT. Nothing is written and 1 + n returned if the caches have no such slot.
EXPORT int64_t motet_store_kv(const void* packed, int64_t count, const int64_t* slots_N, int64_t tokens, int64_t heads,
                              int64_t blocks, int64_t slots_per_block) {
    const Store* stores = static_cast<const Store*>(packed);
    for (int64_t n = 0; n < tokens; n++)
        if (slots_N[n] < NO_SLOT || slots_N[n] >= blocks * slots_per_block) return n + 1;
    const int threads = threads_for(tokens * heads * stores->dim * count, tokens);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < tokens; n++)
        for (int64_t i = 0; i < count && slots_N[n] != NO_SLOT; i++)
            stores[i].token(n, slots_N[n] / slots_per_block, slots_N[n] % slots_per_block, heads);
    return 0;
}

REPLAYABLE(motet_store_kv)
