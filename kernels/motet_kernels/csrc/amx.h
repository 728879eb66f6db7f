// Products of matrices by AMX, whose registers hold tiles of 16 rows of 64 bytes.
//
// A step multiplies 64 bytes of k: 32 numbers of bfloat16, or 64 bytes. The input is packed in such tiles, [rows / 16][steps]
// [16][64 bytes]; a panel of weights holds words of k for 32 columns, so 16 words of it are the two tiles of a step as they lie.
// An output is one sum over the steps from first to last, whatever the number of rows: the same bits in every batch.
#pragma once

#include "linear.h"

namespace {

constexpr int AMX_ROWS = 16, AMX_PAIR = 2 * AMX_ROWS;  // rows of a tile, and of two
constexpr int64_t AMX_WORDS = 16, AMX_TILE = 1024;  // words of k in a step; bytes of a tile
constexpr int64_t PANEL_STEP = 2 * AMX_TILE;        // bytes of a step in a panel

INLINE int64_t amx_steps(int64_t words) { return (words + AMX_WORDS - 1) / AMX_WORDS; }

// What is fetched meanwhile: `lines` per step from `at` on, in turn from places `apart` bytes from one another.
struct AmxFetch {
    const char* at;
    int64_t apart;
    int lines;
};

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

constexpr bool AMX = true;

// Configures this thread's tiles while it lives: all eight of 16 rows of 64 bytes. Nothing else may use them meanwhile.
class AmxTiles {
  public:
    AmxTiles() {
        alignas(64) uint8_t config[64] = {1};
        for (int tile = 0; tile < 8; tile++) config[16 + 2 * tile] = 64, config[48 + tile] = AMX_ROWS;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~AmxTiles() { asm volatile("tilerelease"); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;
};

template <int T>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
INLINE void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
INLINE void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// SUM += INPUT · WEIGHTS, of bfloat16 into float32, or of signed times unsigned bytes into int32.
struct AmxPairs {
    template <int SUM, int INPUT, int WEIGHTS>
    INLINE void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(INPUT), "i"(WEIGHTS));
    }
};
struct AmxBytes {
    template <int SUM, int INPUT, int WEIGHTS>
    INLINE void multiply() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(INPUT), "i"(WEIGHTS));
    }
};

// A panel's columns for one tile of rows, or two that lie `input_stride` bytes apart: PANEL sums of each row, in lines of
// `line`, added to what is there if `adds`. Of a last step that has fewer than 16 words the rest counts as 0.
template <class Kind, int TILES, typename Sum>
void amx_tiles(const char* weights, int64_t words, const char* input, int64_t input_stride, AmxFetch& fetch, Sum* sums,
               int64_t line = PANEL, bool adds = false) {
    const int64_t stride = line * sizeof(Sum);
    Sum* second = sums + AMX_ROWS * line;
    if (adds) {
        tile_load<0>(sums, stride), tile_load<1>(sums + 16, stride);
        if (TILES == 2) tile_load<2>(second, stride), tile_load<3>(second + 16, stride);
    } else {
        tile_zero<0>(), tile_zero<1>();
        if (TILES == 2) tile_zero<2>(), tile_zero<3>();
    }
    auto step = [&](const char* at) __attribute__((always_inline)) {
        tile_load<6>(at, 2 * 64);
        tile_load<4>(input, 64);
        Kind::template multiply<0, 4, 6>();
        tile_load<7>(at + 64, 2 * 64);
        Kind::template multiply<1, 4, 7>();
        if (TILES == 2) {
            tile_load<5>(input + input_stride, 64);
            Kind::template multiply<2, 5, 6>();
            Kind::template multiply<3, 5, 7>();
        }
        input += AMX_TILE;
    };
    for (; words >= AMX_WORDS; words -= AMX_WORDS, weights += PANEL_STEP) {
        for (int line = 0; line < fetch.lines; line += 4, fetch.at += 64)
            UNROLL for (int place = 0; place < 4; place++) __builtin_prefetch(fetch.at + place * fetch.apart, 0, 2);
        step(weights);
    }
    if (words > 0) {
        alignas(64) char rest[PANEL_STEP] = {};
        memcpy(rest, weights, words * 2 * 64);
        step(rest);
    }
    tile_store<0>(sums, stride), tile_store<1>(sums + 16, stride);
    if (TILES == 2) tile_store<2>(second, stride), tile_store<3>(second + 16, stride);
}

#else

constexpr bool AMX = false;
struct AmxTiles {
    AmxTiles() {}
};
struct AmxPairs {};
struct AmxBytes {};
template <class Kind, int TILES, typename Sum>
void amx_tiles(const char*, int64_t, const char*, int64_t, AmxFetch&, Sum*, int64_t = PANEL, bool = false) {}

#endif

// Words of 32 bits that `rows` packed rows of `words` words of k take; none without AMX.
INLINE int64_t amx_packed(int64_t rows, int64_t words) {
    return AMX ? (rows + AMX_ROWS - 1) / AMX_ROWS * amx_steps(words) * AMX_TILE / 4 : 0;
}

// A row of a tile, rounded to bfloat16 and padded with zeros: its 64 bytes of a step lie AMX_TILE bytes after those of the
// step before.
template <typename T>
void amx_pack_row(const T* from, int64_t count, char* to) {
    int64_t k = 0;
    for (; k + 32 <= count; k += 32, to += AMX_TILE)
        for (int n = 0; n < 32; n += W) vstore_operand(reinterpret_cast<bf16*>(to) + n, vload(from + k + n));
    if (k == count) return;
    bf16 rest[32] = {};
    for (int64_t i = 0; i < count - k; i++) narrow(widen(from[k + i]), rest + i);
    memcpy(to, rest, sizeof rest);
}

// Products of `rows` rows with panels of `words` words of k. Panels come in sets, whose first columns lie `apart` panels
// from one another.
template <class Kind, typename Sum, int SETS>
struct AmxProduct {
    const void* weights;
    char* input;  // packed, amx_packed() of it
    int64_t rows, words, panels, apart;

    static constexpr int64_t MOST_INPUT = 5 << 18;  // bytes of input that stay in a second-level cache beside a panel
    static constexpr int64_t MOST_PAIRS = 16;       // of tiles of rows, whose sums stay there, too
    static constexpr int64_t BLOCK = 128;           // words of k of a panel, 16 KiB, that stay in a first-level cache

    // Calls pack(row, to) for every row, whose 64 bytes of a step go to `to`, those of the next step AMX_TILE bytes further, and
    // then done(sums, row, count, panel) with sums [SETS][AMX_PAIR][PANEL], of which `count` rows from `row` on are set, for all
    // of the output.
    template <typename Pack, typename Done>
    void run(int threads, Pack&& pack, Done&& done) const {
        const int64_t tile_bytes = amx_steps(words) * AMX_TILE, pairs = (rows + AMX_PAIR - 1) / AMX_PAIR;
        const int64_t groups = std::max((pairs + MOST_PAIRS - 1) / MOST_PAIRS,
                                        std::min(pairs, (pairs * 2 * tile_bytes + MOST_INPUT - 1) / MOST_INPUT));
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > AMX_ROWS)
        for (int64_t row = 0; row < rows; row++) pack(row, input + row / AMX_ROWS * tile_bytes + row % AMX_ROWS * 64);
        over_panels(threads, panels * PANEL, STREAM_CHUNK, groups, [&](int64_t start, int64_t end, int64_t group) {
            const int64_t first = pairs * group / groups, last = pairs * (group + 1) / groups;
            const AmxTiles configured;
            for (int64_t panel = start; panel < end; panel++) piece(panel, panel + 1 < end, first, last, tile_bytes, done);
        });
    }

  private:
    // A panel of each set times pairs of tiles first.. to last, while the next panels, if any, are fetched. All pairs are
    // multiplied with a block of the panel, then with the next: sums are stored in between, which changes no bit.
    template <typename Done>
    void piece(int64_t panel, bool next, int64_t first, int64_t last, int64_t tile_bytes, Done&& done) const {
        alignas(64) Sum sums[MOST_PAIRS][SETS][AMX_PAIR * PANEL];
        const int64_t panel_bytes = words * 2 * 64, block = last - first > 1 ? BLOCK : words;
        const int64_t steps = std::max<int64_t>(1, words / AMX_WORDS * (last - first));
        for (int set = 0; set < SETS; set++) {
            const char* at = static_cast<const char*>(weights) + (panel + set * apart) * panel_bytes;
            AmxFetch fetch{at + panel_bytes, panel_bytes / 4, next ? int((panel_bytes / 64 + steps - 1) / steps) : 0};
            for (int64_t word = 0; word < words; word += block) {
                const int64_t count = std::min(block, words - word);
                for (int64_t pair = first; pair < last; pair++) {
                    const int64_t row = pair * AMX_PAIR, left = std::min<int64_t>(AMX_PAIR, rows - row);
                    auto multiply = left > AMX_ROWS ? amx_tiles<Kind, 2, Sum> : amx_tiles<Kind, 1, Sum>;
                    const char* tiles = input + pair * 2 * tile_bytes + word / AMX_WORDS * AMX_TILE;
                    multiply(at + word * 2 * 64, count, tiles, tile_bytes, fetch, sums[pair - first][set], PANEL, word > 0);
                    if (set == SETS - 1 && word + count == words) done(sums[pair - first][0], row, int(left), panel);
                }
            }
        }
    }
};

}  // namespace
