// Vectors of W floats under one set of names, for the instruction set that this file is compiled for.
//
// Every library holds one instruction set, so nothing here needs a namespace of its own. All arithmetic is written
// out (fma() where a product and a sum round once) and contraction is off: an expression gives the same bits wherever
// it is inlined. Arithmetic operators on vectors come from GCC's vector extension.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

struct bf16 {
    uint16_t bits;
};

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

// Round to nearest, ties to even, as torch does; a NaN stays one.
INLINE void narrow(float x, float* to) { *to = x; }
INLINE void narrow(float x, bf16* to) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

constexpr int W = 16;
using vec = __m512;

INLINE vec vset(float x) { return _mm512_set1_ps(x); }
INLINE vec vload(const float* p) { return _mm512_loadu_ps(p); }
INLINE vec vload(const bf16* p) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
INLINE void vstore(float* p, vec x) { _mm512_storeu_ps(p, x); }
INLINE void vstore(bf16* p, vec x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(up));
}
#if defined(__AVX512BF16__)
// Products of two bfloat16 numbers in each lane of a and b, added to sum. Written as assembler: for the intrinsic, GCC 12
// keeps two copies of every sum, and the second goes to the stack.
INLINE vec dot_pairs(vec sum, vec a, vec b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
// For these products, which take denormal numbers as 0: so do these roundings.
INLINE void vstore_operand(bf16* p, vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}
#else
INLINE void vstore_operand(bf16* p, vec x) { vstore(p, x); }
#endif
INLINE vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
// The second operand where either is NaN.
INLINE vec vmax(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec vmin(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec vabs(vec a) { return _mm512_abs_ps(a); }
INLINE vec vround(vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x · 2^n for an integral n of at most 150 in size.
INLINE vec vscale(vec x, vec n) { return _mm512_scalef_ps(x, n); }
INLINE vec vselect_less(vec a, vec b, vec yes, vec no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
// Lane l of x where from <= l < to, else of other.
INLINE vec vkeep(vec x, int from, int to, vec other) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 keep = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(from)) &
                     _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(to));
    return _mm512_mask_blend_ps(keep, other, x);
}
// Lane i of the result is the sum of all lanes of x[i], in the same order for every i: each lane with the one half
// the vector away, then a quarter, and so on.
INLINE vec vsum_each(const vec (&x)[W]) {
    auto at = [](int i) { return (i & 4) << 1 | (i & 8) >> 1 | (i & 1) << 1 | (i & 2) >> 1; };
    vec a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_shuffle_f32x4(x[at(i)], x[at(i + 8)], 0x44) + _mm512_shuffle_f32x4(x[at(i)], x[at(i + 8)], 0xee);
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88) + _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
    for (int i = 0; i < 2; i++) c[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44) + _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
    return _mm512_shuffle_ps(c[0], c[1], 0x88) + _mm512_shuffle_ps(c[0], c[1], 0xdd);
}

#elif defined(__AVX2__)

constexpr int W = 8;
using vec = __m256;

INLINE vec vset(float x) { return _mm256_set1_ps(x); }
INLINE vec vload(const float* p) { return _mm256_loadu_ps(p); }
INLINE vec vload(const bf16* p) {
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
INLINE void vstore(float* p, vec x) { _mm256_storeu_ps(p, x); }
INLINE void vstore(bf16* p, vec x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff)), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), nan);
    __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
}
INLINE vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec vmax(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec vmin(vec a, vec b) { return _mm256_min_ps(a, b); }
INLINE vec vabs(vec a) { return _mm256_andnot_ps(vset(-0.0f), a); }
INLINE vec vround(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vec vscale(vec x, vec n) {
    auto power = [](__m256i n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    };
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return x * power(half) * power(_mm256_sub_epi32(whole, half));
}
INLINE vec vselect_less(vec a, vec b, vec yes, vec no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
INLINE vec vkeep(vec x, int from, int to, vec other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i keep = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(from), lane),
                                       _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(keep));
}
INLINE vec vsum_each(const vec (&x)[W]) {
    auto at = [](int i) { return (i & 4) | (i & 1) << 1 | (i & 2) >> 1; };
    vec a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_permute2f128_ps(x[at(i)], x[at(i + 4)], 0x20) + _mm256_permute2f128_ps(x[at(i)], x[at(i + 4)], 0x31);
    for (int i = 0; i < 2; i++) b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44) + _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    return _mm256_shuffle_ps(b[0], b[1], 0x88) + _mm256_shuffle_ps(b[0], b[1], 0xdd);
}

#else

// Any CPU: four lanes in GCC's own vector type.
constexpr int W = 4;
typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));

INLINE vec vset(float x) { return vec{x, x, x, x}; }
INLINE vec vload(const float* p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE vec vload(const bf16* p) { return vec{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
INLINE void vstore(float* p, vec x) { memcpy(p, &x, sizeof x); }
INLINE void vstore(bf16* p, vec x) {
    for (int i = 0; i < W; i++) narrow(x[i], p + i);
}
INLINE vec fma(vec a, vec b, vec c) { return a * b + c; }
INLINE vec vmax(vec a, vec b) { return a > b ? a : b; }
INLINE vec vmin(vec a, vec b) { return a < b ? a : b; }
INLINE vec vabs(vec a) { return (vec)((ivec)a & 0x7fffffff); }
// Adding and taking away 1.5 · 2^23 leaves no room for a fraction.
INLINE vec vround(vec a) { return (a + 12582912.0f) - 12582912.0f; }
INLINE vec vscale(vec x, vec n) {
    ivec whole = __builtin_convertvector(n, ivec), half = whole >> 1;
    return x * (vec)((half + 127) << 23) * (vec)((whole - half + 127) << 23);
}
INLINE vec vselect_less(vec a, vec b, vec yes, vec no) { return a < b ? yes : no; }
INLINE vec vkeep(vec x, int from, int to, vec other) {
    const ivec lane = {0, 1, 2, 3};
    return ((lane >= from) & (lane < to)) ? x : other;
}
INLINE vec vsum_each(const vec (&x)[W]) {
    vec a = __builtin_shuffle(x[0], x[1], ivec{0, 1, 4, 5}) + __builtin_shuffle(x[0], x[1], ivec{2, 3, 6, 7});
    vec b = __builtin_shuffle(x[2], x[3], ivec{0, 1, 4, 5}) + __builtin_shuffle(x[2], x[3], ivec{2, 3, 6, 7});
    return __builtin_shuffle(a, b, ivec{0, 2, 4, 6}) + __builtin_shuffle(a, b, ivec{1, 3, 5, 7});
}

#endif

// Over the lanes, in an order of its own. The largest may pass over a NaN.
INLINE float vmax_lanes(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x);
#else
    float lane[W];
    vstore(lane, x);
    for (int width = W / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
#endif
}

INLINE float vsum_lanes(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(x);
#else
    float lane[W];
    vstore(lane, x);
    for (int width = W / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
#endif
}

// e^x to two units in the last place; 0 below -104, +inf above 88.8; e^0 is 1 exactly, a NaN stays one.
// Range reduction and polynomial as in Cephes' expf.
INLINE vec vexp(vec x) {
    x = vmin(vset(89.0f), vmax(vset(-104.0f), x));
    vec n = vround(x * vset(1.44269504f));
    vec r = fma(n, vset(-0.693359375f), x);
    r = fma(n, vset(2.12194440e-4f), r);
    vec y = vset(1.9875691500e-4f);
    y = fma(y, r, vset(1.3981999507e-3f));
    y = fma(y, r, vset(8.3334519073e-3f));
    y = fma(y, r, vset(4.1665795894e-2f));
    y = fma(y, r, vset(1.6666665459e-1f));
    y = fma(y, r, vset(5.0000001201e-1f));
    y = fma(y, r * r, r) + vset(1.0f);
    return vscale(y, n);
}

// tanh x, small ones by Cephes' polynomial (1 - 2/(e^2x + 1) would lose their digits), the sign put back at the end.
INLINE vec vtanh(vec x) {
    vec size = vabs(x), square = x * x;
    vec y = vset(-5.70498872745e-3f);
    y = fma(y, square, vset(2.06390887954e-2f));
    y = fma(y, square, vset(-5.37397155531e-2f));
    y = fma(y, square, vset(1.33314422036e-1f));
    y = fma(y, square, vset(-3.33332819422e-1f));
    y = fma(y * square, x, x);
    vec large = vset(1.0f) - vset(2.0f) / (vexp(size + size) + vset(1.0f));
    large = vselect_less(x, vset(0.0f), -large, large);
    return vselect_less(size, vset(0.625f), y, large);
}
