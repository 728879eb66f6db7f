// A kernel's second entry, which takes its arguments from an array of 64 bits each: what a tape calls it by.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "simd.h"

namespace replay {

template <typename T>
T argument(int64_t bits) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(bits);
    } else if constexpr (std::is_same_v<T, float>) {
        float value;
        std::memcpy(&value, &bits, sizeof value);  // little-endian, as all CPUs here
        return value;
    } else {
        return bits;
    }
}

template <typename... A, size_t... I>
int64_t call(int64_t (*kernel)(A...), const int64_t* arguments, std::index_sequence<I...>) {
    return kernel(argument<A>(arguments[I])...);
}

template <typename... A>
int64_t call(int64_t (*kernel)(A...), const int64_t* arguments) {
    return call(kernel, arguments, std::index_sequence_for<A...>());
}

}  // namespace replay

#define REPLAYABLE(kernel) \
    EXPORT int64_t kernel##_replay(const int64_t* arguments) { return replay::call(kernel, arguments); }
