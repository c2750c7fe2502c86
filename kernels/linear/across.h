// What runs across the lanes of a vector, for four vectors at once: a third of the work of four times one.
#pragma once

#include "kernels/native/pairs.h"

namespace pw::gemm {

constexpr int AT_ONCE = 4;

// The number without its sign.
PW_INLINE F32 size_of(F32 x) { return (F32)((U32)x & 0x7fffffffu); }

PW_INLINE void sum_of_each(const F32 (&v)[AT_ONCE], float* to) {
    for (int i = 0; i < AT_ONCE; ++i) to[i] = sum(v[i]);
}

#if defined(__AVX512F__)

// Of numbers without sign, of which NaN counts as the largest.
PW_INLINE F32 larger(F32 a, F32 b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

// The lanes of each vector, joined.
template <class Join>
PW_INLINE __m128i across(const __m512i (&v)[AT_ONCE], const Join& join) {
    const auto halves = [&](__m512i a, __m512i b) {
        return join(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
    };
    const __m512i first = halves(v[0], v[1]), second = halves(v[2], v[3]);
    // a quarter for each vector
    __m512i four = join(_mm512_shuffle_i32x4(first, second, 0x88), _mm512_shuffle_i32x4(first, second, 0xDD));
    four = join(four, _mm512_shuffle_epi32(four, _MM_PERM_BADC));
    four = join(four, _mm512_shuffle_epi32(four, _MM_PERM_CDAB));
    const __m512i quarters = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    return _mm512_castsi512_si128(_mm512_permutexvar_epi32(quarters, four));
}

PW_INLINE void largest_of_each(const F32 (&v)[AT_ONCE], float* to) {
    __m512i bits[AT_ONCE];
    for (int i = 0; i < AT_ONCE; ++i) bits[i] = _mm512_castps_si512(v[i]);
    const __m128i largest = across(bits, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); });
    _mm_storeu_ps(to, _mm_castsi128_ps(largest));
}

// Of whole numbers whose sums float32 holds.
PW_INLINE void sum_of_each(const __m512i (&v)[AT_ONCE], float* to) {
    const __m128i sums = across(v, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
    _mm_storeu_ps(to, _mm_cvtepi32_ps(sums));
}

#else

PW_INLINE F32 larger(F32 a, F32 b) { return keep_nan(a, keep_nan(b, max(a, b))); }

PW_INLINE void largest_of_each(const F32 (&v)[AT_ONCE], float* to) {
    for (int i = 0; i < AT_ONCE; ++i) {
        float lanes[LANES];
        store(lanes, v[i]);
        to[i] = lanes[0];
        for (const float x : lanes) to[i] = x > to[i] || x != x ? x : to[i];
    }
}

#endif

}  // namespace pw::gemm
