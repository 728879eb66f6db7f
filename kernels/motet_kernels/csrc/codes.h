// Numbers of 4 and 8 bits as vectors of floats, and rows of floats in 8 bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd.h"

// float8_e4m3fn: a sign, four bits of exponent (bias 7), three of mantissa. Its two NaNs are nobody's: see the wrappers.
struct fp8 {
    uint8_t bits;
};

INLINE float widen(int8_t x) { return float(x); }
INLINE float widen(fp8 x) {
    // As float32 the exponent is 120 too small, also of subnormal numbers.
    uint32_t bits = uint32_t(x.bits & 0x80) << 24 | uint32_t(x.bits & 0x7f) << 20;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide * 0x1p120f;
}

#if defined(__AVX512F__)

INLINE vec vload(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INLINE vec vload(const fp8* p) {
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    __m512i sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24);
    __m512i size = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x7f)), 20);
    return _mm512_castsi512_ps(_mm512_or_si512(sign, size)) * vset(0x1p120f);
}
// The low or the high four bits of W bytes.
INLINE vec vnibbles(const uint8_t* p, bool high) {
    __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtepi32_ps(high ? _mm512_srli_epi32(x, 4) : _mm512_and_si512(x, _mm512_set1_epi32(15)));
}

#elif defined(__AVX2__)

INLINE vec vload(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
INLINE vec vload(const fp8* p) {
    __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x80)), 24);
    __m256i size = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x7f)), 20);
    return _mm256_castsi256_ps(_mm256_or_si256(sign, size)) * vset(0x1p120f);
}
INLINE vec vnibbles(const uint8_t* p, bool high) {
    __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm256_cvtepi32_ps(high ? _mm256_srli_epi32(x, 4) : _mm256_and_si256(x, _mm256_set1_epi32(15)));
}

#else

INLINE vec vload(const int8_t* p) { return vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
INLINE vec vload(const fp8* p) { return vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
INLINE vec vnibbles(const uint8_t* p, bool high) {
    vec x;
    for (int i = 0; i < W; i++) x[i] = float(high ? p[i] >> 4 : p[i] & 15);
    return x;
}

#endif

// The step of a row whose largest number is `most`, which becomes `top`, and one over it; NaN where one is not finite.
struct Step {
    float scale, inverse;
    bool finite;

    template <typename T, typename Count>
    static Step of(const T* from, Count count, float top) {
        int32_t largest = 0;
        for (int64_t i = 0; i < int64_t(count); i++) {
            float x = widen(from[i]);
            int32_t bits;
            memcpy(&bits, &x, 4);
            largest = std::max(largest, bits & 0x7fffffff);
        }
        float most;
        memcpy(&most, &largest, 4);
        const bool finite = largest < 0x7f800000;
        const float scale = most / top;
        // A row of subnormals has no reciprocal: it counts as zeros.
        return {finite ? scale : NAN, finite && scale >= 1.2e-38f ? 1.0f / scale : 0.0f, finite};
    }
};

// `count` values in steps of the returned scale, the largest becoming `top`, and their sum. NaN where one is not finite. A
// count that is a constant (`constant`) spares the loops their ends.
template <int64_t COUNT>
using constant = std::integral_constant<int64_t, COUNT>;

template <typename T, typename Count, typename Integer>
INLINE float quantize(const T* from, Count count, float top, Integer* to, int32_t* sum) {
    const Step step = Step::of(from, count, top);
    int32_t total = 0;
    for (int64_t i = 0; i < int64_t(count); i++) {
        // Adding 1.5 · 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.
        float shifted = (step.finite ? widen(from[i]) : 0.0f) * step.inverse + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        int32_t q = bits - 0x4b400000;
        to[i] = Integer(q);
        total += q;
    }
    *sum = total;
    return step.scale;
}

template <typename T>
float quantize(const T* from, int64_t count, int8_t* to, int32_t* sum) {
    return quantize(from, count, 127.0f, to, sum);
}

// To the nearest, ties to even; larger numbers than 448 become 448.
INLINE fp8 narrow_fp8(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint8_t sign = uint8_t(bits >> 24 & 0x80);
    float size = std::fabs(x);
    if (!(size < 448.0f)) return {uint8_t(sign | 0x7e)};
    if (size < 0x1p-6f) {
        float shifted = size * 512.0f + 12582912.0f;
        memcpy(&bits, &shifted, 4);
        return {uint8_t(sign | (bits - 0x4b400000))};
    }
    memcpy(&bits, &size, 4);
    bits += 0x7ffff + (bits >> 20 & 1);
    return {uint8_t(sign | std::min<uint32_t>((bits >> 20) - (120 << 3), 0x7e))};
}

// The same in float8: the largest becomes 448.
template <typename T>
float quantize(const T* from, int64_t count, fp8* to) {
    const Step step = Step::of(from, count, 448.0f);
    for (int64_t i = 0; i < count; i++) to[i] = narrow_fp8((step.finite ? widen(from[i]) : 0.0f) * step.inverse);
    return step.scale;
}
