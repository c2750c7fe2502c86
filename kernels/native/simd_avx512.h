// 16 lanes: AVX-512 F, BW, DQ, VL; conversions to bfloat16 by AVX512-BF16 where the level has it.
#pragma once

#include <immintrin.h>

namespace pw {

using F32 = __m512;
constexpr int LANES = 16;

PW_INLINE __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1u); }

PW_INLINE F32 zero() { return _mm512_setzero_ps(); }
PW_INLINE F32 set1(float x) { return _mm512_set1_ps(x); }
PW_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
PW_INLINE F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
PW_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
PW_INLINE F32 round(F32 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PW_INLINE F32 times_power_of_two(F32 x, F32 n) { return _mm512_scalef_ps(x, n); }
PW_INLINE F32 keep_nan(F32 x, F32 y) { return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x); }
PW_INLINE F32 select_less(F32 a, F32 b, F32 yes, F32 no) {
    return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes);
}
PW_INLINE F32 with_sign_of(F32 size, F32 sign) {
    const __m512i bit = _mm512_set1_epi32(int(0x80000000u));
    // 0xE4: bit ? sign : size
    const __m512i out = _mm512_ternarylogic_epi32(_mm512_castps_si512(sign), _mm512_castps_si512(size), bit, 0xE4);
    return _mm512_castsi512_ps(out);
}

PW_INLINE F32 widen16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
PW_INLINE F32 widen8(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }

PW_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
PW_INLINE F32 load(const bf16* p) { return widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
PW_INLINE F32 load(const int8_t* p) { return widen8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
PW_INLINE F32 load(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
PW_INLINE F32 load(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
PW_INLINE F32 load(const bf16* p, int n) { return widen16(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
PW_INLINE F32 load(const int8_t* p, int n) { return widen8(_mm_maskz_loadu_epi8(first_lanes(n), p)); }

PW_INLINE __m256i narrow16(F32 v) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i half = _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), is_odd, _mm512_set1_epi32(0x8000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i rounded =
        _mm512_mask_or_epi32(_mm512_add_epi32(bits, half), is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

PW_INLINE void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
PW_INLINE void store(bf16* p, F32 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(v)); }
PW_INLINE void store(float* p, F32 v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
PW_INLINE void store(bf16* p, F32 v, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow16(v)); }
PW_INLINE void store_i8(int8_t* p, F32 v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}

PW_INLINE float sum(F32 v) { return _mm512_reduce_add_ps(v); }
PW_INLINE bool any_above(F32 v, float x) { return _mm512_cmp_ps_mask(v, set1(x), _CMP_NLE_UQ) != 0; }
PW_INLINE float max(F32 v) { return _mm512_reduce_max_ps(v); }

}  // namespace pw
