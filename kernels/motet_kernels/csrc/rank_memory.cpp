// Sums and joins of tensors of several processes (ranks) of one host, in memory that all of them map.
//
// The memory holds a head, a line per rank, and two slots per rank. A collective is cut into pieces of a slot. For each
// piece a rank writes its part into its slot, publishes the piece's number, waits until all ranks have, and reads the
// others' slots. Pieces use the two slots in turn, so one wait per piece is enough: who writes into a slot again has seen all
// others publish the piece after it, thus finish reading.
//
// Numbers are summed in pairs of neighbouring ranks, then in pairs of pairs, in float32: the same bits on every rank.
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <ctime>

#include "parallel.h"
#include "replay.h"

namespace {

constexpr int64_t MAX_RANKS = 64;
constexpr int64_t LINE = 128;  // a CPU may fetch two cache lines at a time
constexpr int64_t LOOK_AGAIN = 50'000'000;  // ns that a rank sleeps at most before it looks whether the group has failed
constexpr int64_t LATE = 1, BROKEN = 2;

struct alignas(LINE) Head {
    std::atomic<uint32_t> is_broken;
};

struct alignas(LINE) Line {
    std::atomic<uint32_t> published;  // number of the last piece in the rank's slot
    std::atomic<uint32_t> sleepers;   // ranks that sleep until this one publishes
};

// In the memory of one rank; `rank_memory.py` declares it again.
struct Place {
    uint8_t* memory;
    int64_t rank, size, slot_bytes;
    int64_t spin_ns, timeout_ns;  // how long to spin before sleeping, and to wait at all
    int64_t pieces;               // that this rank has published
    int64_t failure;              // 0, LATE or BROKEN, for ever
};

// Copy into a slot past the caches: lines that another core's cache holds are slow to take from it, four times so seen
// on Zen 4. Not on processors with AMX, whose caches hand them on faster than memory does. `to` is aligned to a line,
// unless the piece ends there.
INLINE void give(uint8_t* to, const uint8_t* from, int64_t nbytes) {
    int64_t i = 0;
#if defined(__AMX_TILE__)
#elif defined(__AVX512F__)
    for (; i + 64 <= nbytes; i += 64)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX2__)
    for (; i + 32 <= nbytes; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256((const __m256i*)(from + i)));
#elif defined(__SSE2__)
    for (; i + 16 <= nbytes; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128((const __m128i*)(from + i)));
#endif
    memcpy(to + i, from + i, nbytes - i);
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

INLINE void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

Head& head_of(const Place& place) { return *reinterpret_cast<Head*>(place.memory); }

Line& line_of(const Place& place, int64_t rank) { return reinterpret_cast<Line*>(place.memory + sizeof(Head))[rank]; }

uint8_t* slot_of(const Place& place, int64_t rank) {
    return place.memory + sizeof(Head) + place.size * sizeof(Line) +
           (rank * 2 + place.pieces % 2) * place.slot_bytes;
}

#if defined(__linux__)
// Sleep while the word is `seen`, for at most `nanoseconds`.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen, int64_t nanoseconds) {
    const timespec time{time_t(nanoseconds / 1'000'000'000), long(nanoseconds % 1'000'000'000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#else
void sleep_on(std::atomic<uint32_t>&, uint32_t, int64_t) { sched_yield(); }
void wake(std::atomic<uint32_t>&) {}
#endif

void break_off(const Place& place) {
    head_of(place).is_broken.store(1);
    for (int64_t rank = 0; rank < place.size; rank++) wake(line_of(place, rank).published);
}

int64_t fail(Place& place, int64_t failure) {
    place.failure = failure;
    break_off(place);
    return failure;
}

// 0, LATE or BROKEN.
int64_t wait_for(const Place& place, int64_t rank, uint32_t piece) {
    Line& line = line_of(place, rank);
    auto is_there = [&] { return int32_t(line.published.load() - piece) >= 0; };
    if (is_there()) return 0;
    const int64_t begin = now();
    do {
        for (int i = 0; i < 32; i++) {
            pause_briefly();
            if (is_there()) return 0;
        }
    } while (now() - begin < place.spin_ns);
    sched_yield();
    line.sleepers.fetch_add(1);
    int64_t failure = 0;
    while (true) {
        const uint32_t seen = line.published.load();
        if (is_there()) break;
        if (head_of(place).is_broken.load()) {
            failure = BROKEN;
            break;
        }
        const int64_t left = begin + place.timeout_ns - now();
        if (left <= 0) {
            failure = LATE;
            break;
        }
        sleep_on(line.published, seen, std::min(left, LOOK_AGAIN));
    }
    line.sleepers.fetch_sub(1);
    return failure;
}

// Publish what is in the rank's slot, and wait until all ranks have. 0, LATE or BROKEN.
int64_t meet(Place& place) {
    const uint32_t piece = uint32_t(place.pieces + 1);
    Line& own = line_of(place, place.rank);
    own.published.store(piece);
    if (own.sleepers.load()) wake(own.published);
    for (int64_t rank = 0; rank < place.size; rank++)
        if (rank != place.rank)
            if (int64_t failure = wait_for(place, rank, piece)) return fail(place, failure);
    return 0;
}

// The sum of what `load` gives for each rank: neighbours first.
template <typename V, typename Load>
INLINE V sum_in_pairs(int64_t size, Load load) {
    if (size == 2) return load(0) + load(1);
    if (size == 4) return (load(0) + load(1)) + (load(2) + load(3));
    V parts[MAX_RANKS];
    for (int64_t i = 0; i < size; i++) parts[i] = load(i);
    for (int64_t left = size; left > 1; left = (left + 1) / 2) {
        for (int64_t i = 0; i < left / 2; i++) parts[i] = parts[2 * i] + parts[2 * i + 1];
        if (left % 2) parts[left / 2] = parts[left - 1];
    }
    return parts[0];
}

constexpr int64_t BLOCK = 16384;  // numbers, a multiple of every W

template <typename F>
INLINE void by_blocks(int64_t count, F work) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
    const int threads = threads_for(count, blocks);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < blocks; i++) work(i * BLOCK, std::min(count, (i + 1) * BLOCK));
}

template <typename T>
int64_t sum(Place& place, T* x, int64_t count) {
    const int64_t most = place.slot_bytes / int64_t(sizeof(T));
    for (int64_t begin = 0; begin < count; begin += most, place.pieces++) {
        const int64_t here = std::min(most, count - begin);
        uint8_t* own = slot_of(place, place.rank);
        T* piece = x + begin;
        const T* parts[MAX_RANKS];
        for (int64_t rank = 0; rank < place.size; rank++) parts[rank] = reinterpret_cast<T*>(slot_of(place, rank));
        parts[place.rank] = piece;  // still in the cache
        by_blocks(here, [&](int64_t from, int64_t to) {
            give(own + from * sizeof(T), reinterpret_cast<uint8_t*>(piece + from), (to - from) * sizeof(T));
        });
        if (int64_t failure = meet(place)) return failure;
        by_blocks(here, [&](int64_t from, int64_t to) {
            int64_t i = from;
            for (; i + W <= to; i += W)
                vstore(piece + i, sum_in_pairs<vec>(place.size, [&](int64_t rank) { return vload(parts[rank] + i); }));
            for (; i < to; i++)
                narrow(sum_in_pairs<float>(place.size, [&](int64_t rank) { return widen(parts[rank][i]); }), piece + i);
        });
    }
    return 0;
}

}  // namespace

// x [count] of float32, or of bfloat16, becomes the sum over all ranks. 0, or why there is none: LATE, BROKEN.
EXPORT int64_t motet_rank_sum(Place* place, void* x, int64_t is_bf16, int64_t count) {
    if (place->failure) return place->failure;
    return is_bf16 ? sum(*place, static_cast<bf16*>(x), count) : sum(*place, static_cast<float*>(x), count);
}

// out [rows, sum of widths] of the ranks' parts [rows, widths[rank]] side by side; widths in bytes, the same on all
// ranks. Where out is null, the rank gives its part and takes none.
EXPORT int64_t motet_rank_join(Place* place, const uint8_t* part, uint8_t* out, int64_t rows, const int64_t* widths) {
    if (place->failure) return place->failure;
    int64_t widest = 0, whole = 0;
    for (int64_t rank = 0; rank < place->size; rank++) widest = std::max(widest, widths[rank]), whole += widths[rank];
    const int64_t longest = std::max<int64_t>(1, rows * widest);  // without bytes, ranks still meet
    for (int64_t begin = 0; begin < longest; begin += place->slot_bytes, place->pieces++) {
        const int64_t end = begin + place->slot_bytes, own = rows * widths[place->rank];
        if (begin < own) give(slot_of(*place, place->rank), part + begin, std::min(end, own) - begin);
        if (int64_t failure = meet(*place)) return failure;
        for (int64_t rank = 0, column = 0; out && rank < place->size; column += widths[rank++]) {
            const int64_t width = widths[rank], stop = std::min(end, rows * width);
            const uint8_t* slot = slot_of(*place, rank);
            for (int64_t at = begin; at < stop;) {
                const int64_t row = at / width, run = std::min(stop, (row + 1) * width) - at;
                memcpy(out + row * whole + column + at % width, slot + at - begin, run);
                at += run;
            }
        }
    }
    return 0;
}

// Have every rank that waits, or will, give up.
EXPORT int64_t motet_rank_break_off(const Place* place) {
    break_off(*place);
    return 0;
}

REPLAYABLE(motet_rank_sum)
