// What the products of int8 and int4 weights share: dot products of four bytes, the input rounded to int8.
#pragma once

#include "amx.h"
#include "codes.h"
#include "linear.h"

namespace {

// `crumbs`: two bits of each byte, those of number 0 the lowest.
#if defined(__AVX512F__)

using word = __m512i;
INLINE word wset(int32_t x) { return _mm512_set1_epi32(x); }
INLINE word wadd(word a, word b) { return _mm512_add_epi32(a, b); }
INLINE word wload(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE word low_nibbles(word x) { return _mm512_and_si512(x, wset(0x0f0f0f0f)); }
INLINE word high_nibbles(word x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
INLINE word crumbs(word x, int which) { return _mm512_and_si512(_mm512_srli_epi16(x, 2 * which), wset(0x03030303)); }
INLINE vec to_float(word x) { return _mm512_cvtepi32_ps(x); }
#if defined(__AVX512VNNI__)
// Written as assembler: for the intrinsic, GCC 12 keeps two copies of every sum, and the second goes to the stack. So are
// the additions below.
INLINE word dot(word sum, word w, word x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}
#else
INLINE word dot(word sum, word w, word x) {
    const word low = wset(0x00ff00ff);
    word even = _mm512_madd_epi16(_mm512_and_si512(w, low), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    word odd = _mm512_madd_epi16(_mm512_and_si512(_mm512_srli_epi16(w, 8), low), _mm512_srai_epi16(x, 8));
    return wadd(sum, wadd(even, odd));
}
#endif

#elif defined(__AVX2__)

using word = __m256i;
INLINE word wset(int32_t x) { return _mm256_set1_epi32(x); }
INLINE word wadd(word a, word b) { return _mm256_add_epi32(a, b); }
INLINE word wload(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE word low_nibbles(word x) { return _mm256_and_si256(x, wset(0x0f0f0f0f)); }
INLINE word high_nibbles(word x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
INLINE word crumbs(word x, int which) { return _mm256_and_si256(_mm256_srli_epi16(x, 2 * which), wset(0x03030303)); }
INLINE vec to_float(word x) { return _mm256_cvtepi32_ps(x); }
INLINE word dot(word sum, word w, word x) {
    const word low = wset(0x00ff00ff);
    word even = _mm256_madd_epi16(_mm256_and_si256(w, low), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    word odd = _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 8), low), _mm256_srai_epi16(x, 8));
    return wadd(sum, wadd(even, odd));
}

#else

using word = ivec;
INLINE word wset(int32_t x) { return ivec{x, x, x, x}; }
INLINE word wadd(word a, word b) { return a + b; }
INLINE word wload(const uint8_t* p) {
    word x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE word low_nibbles(word x) { return x & 0x0f0f0f0f; }
INLINE word high_nibbles(word x) { return (x >> 4) & 0x0f0f0f0f; }
INLINE word crumbs(word x, int which) { return (x >> 2 * which) & 0x03030303; }
INLINE vec to_float(word x) { return __builtin_convertvector(x, vec); }
INLINE word dot(word sum, word w, word x) {
    for (int shift = 0; shift < 32; shift += 8) sum += ((w >> shift) & 0xff) * ((x << (24 - shift)) >> 24);
    return sum;
}

#endif

// Products of nibbles (0 to 15) and input bytes. `gather` adds up at most eight of them per byte of a word, which is what a
// group of int4 has; `gathered` are then the sums of the words. 8 · 2 · 15 · 127 fits into 16 bits.
#if defined(__AVX512VNNI__) || !defined(__AVX2__)
constexpr bool GATHERS16 = false;
INLINE word gather(word sum, word w, word x) { return dot(sum, w, x); }
INLINE word gathered(word sum) { return sum; }
#elif defined(__AVX512F__)
constexpr bool GATHERS16 = true;
INLINE word gather(word sum, word w, word x) {
    asm("vpaddw %1, %0, %0" : "+v"(sum) : "v"(_mm512_maddubs_epi16(w, x)));
    return sum;
}
INLINE word gathered(word sum) { return _mm512_madd_epi16(sum, wset(0x00010001)); }
#else
constexpr bool GATHERS16 = true;
INLINE word gather(word sum, word w, word x) {
    asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(_mm256_maddubs_epi16(w, x)));
    return sum;
}
INLINE word gathered(word sum) { return _mm256_madd_epi16(sum, wset(0x00010001)); }
#endif

// The sum of products of 16-bit pairs; the even and the odd bytes of words as such pairs.
#if defined(__AVX512F__)
#if defined(__AVX512VNNI__)
INLINE word pairs(word sum, word w, word x) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}
#else
INLINE word pairs(word sum, word w, word x) {
    asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(_mm512_madd_epi16(w, x)));
    return sum;
}
#endif
INLINE word even(word x) { return _mm512_and_si512(x, wset(0x00ff00ff)); }
INLINE word odd(word x) { return _mm512_srli_epi16(x, 8); }
INLINE word wload(const int32_t* p) { return _mm512_loadu_si512(p); }
INLINE void wstore(int32_t* p, word x) { _mm512_storeu_si512(p, x); }
#elif defined(__AVX2__)
INLINE word pairs(word sum, word w, word x) {
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(w, x)));
    return sum;
}
INLINE word even(word x) { return _mm256_and_si256(x, wset(0x00ff00ff)); }
INLINE word odd(word x) { return _mm256_srli_epi16(x, 8); }
INLINE word wload(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE void wstore(int32_t* p, word x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
#else
INLINE word pairs(word sum, word w, word x) { return sum + ((w << 16) >> 16) * ((x << 16) >> 16) + (w >> 16) * (x >> 16); }
INLINE word even(word x) { return x & 0x00ff00ff; }
INLINE word odd(word x) { return (x >> 8) & 0x00ff00ff; }
INLINE word wload(const int32_t* p) {
    word x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void wstore(int32_t* p, word x) { memcpy(p, &x, sizeof x); }
#endif

// Of each byte, 0 to 15, the byte of the table that it names; bits of two words together; bytes 0 and 2 moved up by one.
#if defined(__AVX512F__)
INLINE word lookup(const int8_t* table, word x) {
    const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), x);
}
INLINE word wor(word a, word b) { return _mm512_or_si512(a, b); }
INLINE word wshift_up(word x) { return _mm512_slli_epi16(x, 8); }
#elif defined(__AVX2__)
INLINE word lookup(const int8_t* table, word x) {
    const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), x);
}
INLINE word wor(word a, word b) { return _mm256_or_si256(a, b); }
INLINE word wshift_up(word x) { return _mm256_slli_epi16(x, 8); }
#else
INLINE word lookup(const int8_t* table, word x) {
    uint8_t codes[sizeof x], found[sizeof x];
    memcpy(codes, &x, sizeof x);
    for (size_t i = 0; i < sizeof x; i++) found[i] = uint8_t(table[codes[i]]);
    memcpy(&x, found, sizeof x);
    return x;
}
INLINE word wor(word a, word b) { return a | b; }
INLINE word wshift_up(word x) { return (x << 8) & int32_t(0xff00ff00); }
#endif

struct IntegerProduct : Product {
    static constexpr int64_t GROUP = 32;
    const uint8_t* weights;
    const float* scales;  // of columns (int8)
    int64_t words;        // K / 4, rounded up
    int64_t groups;       // scales per input row
    // The quantized input, by tiles: [words][rows] of four bytes, [groups][rows] scales and sums.
    int32_t* packed;
    float* row_scales;
    int32_t* row_sums;

    template <typename T>
    void pack(int64_t row, int rows) const {
        int8_t* line = quantized_row.get<int8_t>(words * 4);
        memset(line + K, 0, words * 4 - K);
        const int64_t length = groups == 1 ? K : GROUP;
        for (int m = 0; m < rows; m++) {
            const T* from = static_cast<const T*>(input) + (row + m) * input_stride;
            for (int64_t g = 0; g < groups; g++) {
                const int64_t place = row * groups + g * rows + m, count = std::min(length, K - g * length);
                row_scales[place] = quantize(from + g * length, count, line + g * length, row_sums + place);
            }
            for (int64_t k = 0; k < words; k++) memcpy(packed + row * words + k * rows + m, line + k * 4, 4);
        }
    }

    void pack(int64_t row, int rows) const { input_bf16 ? pack<bf16>(row, rows) : pack<float>(row, rows); }

    // A row of one scale, as AmxProduct has it.
    template <typename T>
    void pack_row(int64_t row, char* to) const {
        const int64_t steps = amx_steps(words);
        int8_t* line = quantized_row.get<int8_t>(steps * 64);
        memset(line + K, 0, steps * 64 - K);
        row_scales[row] = quantize(static_cast<const T*>(input) + row * input_stride, K, line, row_sums + row);
        for (int64_t step = 0; step < steps; step++) memcpy(to + step * AMX_TILE, line + step * 64, 64);
    }

    void pack_row(int64_t row, char* to) const { input_bf16 ? pack_row<bf16>(row, to) : pack_row<float>(row, to); }

    // Sums of int8 in columns from `column` on, as numbers.
    vec scaled(word sum, int64_t row, int64_t column) const {
        return to_float(sum) * vset(row_scales[row]) * vload(scales + column);
    }

    static thread_local Scratch packed_words, packed_scales, packed_sums, quantized_row;
};

thread_local Scratch IntegerProduct::packed_words, IntegerProduct::packed_scales, IntegerProduct::packed_sums,
    IntegerProduct::quantized_row;

}  // namespace
