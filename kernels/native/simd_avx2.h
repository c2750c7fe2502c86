// 8 lanes: AVX2 and FMA.
#pragma once

#include <immintrin.h>

namespace pw {

using F32 = __m256;
constexpr int LANES = 8;

PW_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

PW_INLINE F32 zero() { return _mm256_setzero_ps(); }
PW_INLINE F32 set1(float x) { return _mm256_set1_ps(x); }
PW_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
PW_INLINE F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
PW_INLINE F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
PW_INLINE F32 round(F32 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// n is a whole number from -126 to 128; in two factors, since 2^128 is not a float.
PW_INLINE F32 times_power_of_two(F32 x, F32 n) {
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return x * _mm256_castsi256_ps(first) * _mm256_castsi256_ps(second);
}
PW_INLINE F32 keep_nan(F32 x, F32 y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
PW_INLINE F32 select_less(F32 a, F32 b, F32 yes, F32 no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
PW_INLINE F32 with_sign_of(F32 size, F32 sign) {
    const F32 bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, size), _mm256_and_ps(bit, sign));
}

PW_INLINE F32 widen16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
PW_INLINE F32 widen8(__m128i codes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)); }

template <class T>
PW_INLINE __m128i part(const T* p, int n) {
    alignas(16) uint8_t room[16] = {};
    std::memcpy(room, p, size_t(n) * sizeof(T));
    return _mm_load_si128(reinterpret_cast<const __m128i*>(room));
}

PW_INLINE F32 load(const float* p) { return _mm256_loadu_ps(p); }
PW_INLINE F32 load(const bf16* p) { return widen16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
PW_INLINE F32 load(const int8_t* p) { return widen8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
PW_INLINE F32 load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
PW_INLINE F32 load(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
PW_INLINE F32 load(const bf16* p, int n) { return widen16(part(p, n)); }
PW_INLINE F32 load(const int8_t* p, int n) { return widen8(part(p, n)); }

PW_INLINE __m128i narrow16(F32 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i out = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1));
}

PW_INLINE void store(float* p, F32 v) { _mm256_storeu_ps(p, v); }
PW_INLINE void store(bf16* p, F32 v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow16(v)); }
PW_INLINE void store(float* p, F32 v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
PW_INLINE void store(bf16* p, F32 v, int n) {
    alignas(16) bf16 room[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(room), narrow16(v));
    std::memcpy(p, room, size_t(n) * sizeof(bf16));
}
PW_INLINE void store_i8(int8_t* p, F32 v) {
    const __m256i whole = _mm256_cvtps_epi32(v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

PW_INLINE float sum(F32 v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
PW_INLINE bool any_above(F32 v, float x) { return _mm256_movemask_ps(_mm256_cmp_ps(v, set1(x), _CMP_NLE_UQ)) != 0; }
PW_INLINE float max(F32 v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

}  // namespace pw
