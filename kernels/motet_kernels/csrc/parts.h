// The last part of a row, where it is no whole vector.
#pragma once

#include <algorithm>

#include "simd.h"

// The first `count` lanes, zeros behind them.
INLINE vec vload_part(const float* p, int64_t count) {
    float lane[W] = {};
    std::copy(p, p + count, lane);
    return vload(lane);
}

INLINE void vstore_part(float* p, vec x, int64_t count) {
    float lane[W];
    vstore(lane, x);
    std::copy(lane, lane + count, p);
}
