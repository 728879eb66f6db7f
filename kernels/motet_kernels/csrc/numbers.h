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

// A number per output and group of inputs, [panels][groups][32]. Of kind LEVELS a number is a small integer times what
// `span` groups share, [panels][spans][32] in float32.
struct Numbers {
    enum : int64_t { FLOAT32, FLOAT16, BFLOAT16, LEVELS };

    int64_t kind;
    const void* fine;  // null: there are none
    const float* coarse;
    int64_t groups, span;

    // Where a panel's own numbers lie, and how many bytes they take.
    const char* bytes(int64_t panel) const { return static_cast<const char*>(fine) + panel * panel_bytes(); }
    int64_t panel_bytes() const { return groups * 32 * (kind == FLOAT32 ? 4 : kind == LEVELS ? 1 : 2); }

    // All of a panel, [groups][32]. Fetches the numbers of the panel that lies `ahead` panels behind it.
    void decode(int64_t panel, int64_t ahead, float* to) const {
        const char* later = bytes(panel + ahead);
        for (int64_t b = 0; b < panel_bytes(); b += 64) __builtin_prefetch(later + b, 0, 2);
        const int64_t begin = panel * groups * 32, spans = (groups + span - 1) / span;
        if (kind == FLOAT16)
            copy(static_cast<const f16*>(fine) + begin, to);
        else if (kind == BFLOAT16)
            copy(static_cast<const bf16*>(fine) + begin, to);
        else if (kind == FLOAT32)
            copy(static_cast<const float*>(fine) + begin, to);
        else
            for (int64_t s = 0; s < spans; s++)
                for (int64_t n = 0; n < 32; n += W) {
                    const vec shared = vload(coarse + (panel * spans + s) * 32 + n);
                    const int8_t* from = static_cast<const int8_t*>(fine) + begin + n;
                    for (int64_t g = s * span; g < std::min((s + 1) * span, groups); g++)
                        vstore(to + g * 32 + n, vload(from + g * 32) * shared);
                }
    }

  private:
    template <typename T>
    void copy(const T* from, float* to) const {
        for (int64_t i = 0; i < groups * 32; i += W) vstore(to + i, vload(from + i));
    }
};
