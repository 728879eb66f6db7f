// The last part of a row, where it is no whole vector.
#pragma once

#include <algorithm>

#include "simd.h"

// The first `count` lanes, zeros behind them.
template <typename T>
INLINE vec vload_part(const T* p, int64_t count) {
    T lane[W] = {};
    std::copy(p, p + count, lane);
    return vload(lane);
}

template <typename T>
INLINE void vstore_part(T* p, vec x, int64_t count) {
    T lane[W];
    vstore(lane, x);
    std::copy(lane, lane + count, p);
}
