// How many threads a kernel takes: torch's setting, and one where the work is smaller than the cost of waking more.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

// `work` in multiply-adds or elements moved, `tasks` the number of pieces that it falls into.
static inline int threads_for(int64_t work, int64_t tasks) {
    // One or two microseconds of work; waking a thread that waits passively costs four, one that spins less than one.
    constexpr int64_t worth_a_thread = 65536;
    if (omp_in_parallel()) return 1;
    int64_t useful = std::min(tasks, work / worth_a_thread);
    return int(std::max<int64_t>(1, std::min<int64_t>(useful, omp_get_max_threads())));
}
