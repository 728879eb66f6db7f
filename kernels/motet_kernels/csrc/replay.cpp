// Calls of kernels that were written down once, one after another.
#include "simd.h"

namespace {

struct Call {
    int64_t (*kernel)(const int64_t* arguments);
    const int64_t* arguments;
};

}  // namespace

// 0, or 1 + the number of the first call that did not return 0; those after it are not made.
EXPORT int64_t motet_replay(const void* calls, int64_t count) {
    const Call* call = static_cast<const Call*>(calls);
    for (int64_t i = 0; i < count; i++)
        if (call[i].kernel(call[i].arguments)) return i + 1;
    return 0;
}
