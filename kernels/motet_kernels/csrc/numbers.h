// Scales and shifts of weights in codes, in the narrowest type that holds them exactly.
#pragma once

#include "codes.h"

struct f16 {
    uint16_t bits;
};

INLINE float widen(f16 x) {
    // As float32 the exponent is 112 too small, also of subnormal numbers.
    const uint32_t bits = uint32_t(x.bits & 0x8000) << 16 | uint32_t(x.bits & 0x7fff) << 13;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide * 0x1p112f;
}

#if defined(__AVX512F__)
INLINE vec vload(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
#elif defined(__AVX2__)
INLINE vec vload(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
#else
INLINE vec vload(const f16* p) { return vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
#endif

// A number per output and group of inputs, [panels][groups][32]. Of the kinds LEVELS a number is a small integer times what
// `span` groups share, [panels][spans][32] in float32, or in float16 (LEVELS16).
struct Numbers {
    enum : int64_t { FLOAT32, FLOAT16, BFLOAT16, LEVELS, LEVELS16 };

    int64_t kind;
    const void* fine;  // null: there are none
    const void* coarse;
    int64_t groups, span;

    bool leveled() const { return kind >= LEVELS; }
    int64_t width() const { return kind == FLOAT32 ? 4 : leveled() ? 1 : 2; }  // bytes of a number
    int64_t shared_width() const { return kind == LEVELS ? 4 : 2; }

    // Where a panel's own numbers lie, and how many bytes they take.
    const char* bytes(int64_t panel) const { return static_cast<const char*>(fine) + panel * panel_bytes(); }
    int64_t panel_bytes() const { return groups * 32 * width(); }

    // All of a panel, [groups][32].
    void decode(int64_t panel, float* to) const {
        for (int64_t n = 0; n < 32; n += W) {
            Reader from = reader(panel, n);
            vec number[1];
            for (int64_t g = 0; g < groups; g++) {
                from.next(number);
                vstore(to + g * 32 + n, number[0]);
            }
        }
    }

    // Reads the numbers of a panel's columns, one group after the other.
    struct Reader {
        int64_t kind, shared_width, span, left;  // left: of the groups that share a number
        const char *fine, *coarse;

        // N vectors of the next group. Fetches those that lie a fixed distance behind.
        template <int N>
        inline __attribute__((always_inline)) void next(vec (&to)[N]) {
            constexpr int64_t AHEAD = 2048;  // bytes
            __builtin_prefetch(fine + AHEAD, 0, 2);
            if (kind >= LEVELS) {
                for (int v = 0; v < N; v++) {
                    const vec shared = kind == LEVELS ? vload(reinterpret_cast<const float*>(coarse) + v * W)
                                                      : vload(reinterpret_cast<const f16*>(coarse) + v * W);
                    to[v] = vload(reinterpret_cast<const int8_t*>(fine) + v * W) * shared;
                }
                fine += 32;
                if (--left == 0) coarse += 32 * shared_width, left = span;
            } else if (kind == FLOAT16) {
                take<f16>(to);
            } else if (kind == BFLOAT16) {
                take<bf16>(to);
            } else {
                take<float>(to);
            }
        }

      private:
        template <typename T, int N>
        inline __attribute__((always_inline)) void take(vec (&to)[N]) {
            for (int v = 0; v < N; v++) to[v] = vload(reinterpret_cast<const T*>(fine) + v * W);
            fine += 32 * sizeof(T);
        }
    };

    Reader reader(int64_t panel, int64_t column) const {
        const int64_t spans = (groups + span - 1) / span;
        const char* shared = static_cast<const char*>(coarse);
        if (leveled()) shared += (panel * spans * 32 + column) * shared_width();
        return {kind, shared_width(), span, span, bytes(panel) + column * width(), shared};
    }
};
