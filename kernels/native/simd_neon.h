// 4 lanes: Advanced SIMD of 64-bit Arm.
#pragma once

#include <arm_neon.h>

namespace pw {

using F32 = float32x4_t;
constexpr int LANES = 4;

PW_INLINE F32 zero() { return vdupq_n_f32(0.0f); }
PW_INLINE F32 set1(float x) { return vdupq_n_f32(x); }
PW_INLINE F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
// As on x86: the second operand if one of them is NaN.
PW_INLINE F32 min(F32 a, F32 b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
PW_INLINE F32 max(F32 a, F32 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
PW_INLINE F32 round(F32 x) { return vrndnq_f32(x); }
// n is a whole number from -126 to 128; in two factors, since 2^128 is not a float.
PW_INLINE F32 times_power_of_two(F32 x, F32 n) {
    const int32x4_t whole = vcvtq_s32_f32(n);
    const int32x4_t half = vshrq_n_s32(whole, 1);
    const int32x4_t bias = vdupq_n_s32(127);
    const F32 first = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
    const F32 second = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23));
    return vmulq_f32(vmulq_f32(x, first), second);
}
PW_INLINE F32 keep_nan(F32 x, F32 y) { return vbslq_f32(vceqq_f32(x, x), y, x); }
PW_INLINE F32 select_less(F32 a, F32 b, F32 yes, F32 no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
PW_INLINE F32 with_sign_of(F32 size, F32 sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, size); }

PW_INLINE F32 widen16(uint16x4_t bits) { return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(bits), 16)); }
PW_INLINE F32 widen8(int8x8_t codes) { return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(codes)))); }

template <class T>
PW_INLINE void copy_part(T* room, const T* p, int n) {
    std::memcpy(room, p, size_t(n) * sizeof(T));
}

PW_INLINE F32 load(const float* p) { return vld1q_f32(p); }
PW_INLINE F32 load(const bf16* p) { return widen16(vld1_u16(&p->bits)); }
PW_INLINE F32 load(const f16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))); }
PW_INLINE F32 load(const int8_t* p) {
    int8_t room[8] = {};
    copy_part(room, p, 4);
    return widen8(vld1_s8(room));
}
PW_INLINE F32 load(const float* p, int n) {
    float room[4] = {};
    copy_part(room, p, n);
    return load(room);
}
PW_INLINE F32 load(const bf16* p, int n) {
    bf16 room[4] = {};
    copy_part(room, p, n);
    return load(room);
}
PW_INLINE F32 load(const int8_t* p, int n) {
    int8_t room[8] = {};
    copy_part(room, p, n);
    return widen8(vld1_s8(room));
}

PW_INLINE uint16x4_t narrow16(F32 v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
}

PW_INLINE void store(float* p, F32 v) { vst1q_f32(p, v); }
PW_INLINE void store(bf16* p, F32 v) { vst1_u16(&p->bits, narrow16(v)); }
PW_INLINE void store(float* p, F32 v, int n) {
    float room[4];
    vst1q_f32(room, v);
    copy_part(p, room, n);
}
PW_INLINE void store(bf16* p, F32 v, int n) {
    bf16 room[4];
    store(room, v);
    copy_part(p, room, n);
}
PW_INLINE void store_i8(int8_t* p, F32 v) {
    const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(v));
    const int8x8_t codes = vqmovn_s16(vcombine_s16(words, words));
    std::memcpy(p, &codes, 4);
}

PW_INLINE float sum(F32 v) { return vaddvq_f32(v); }
PW_INLINE bool any_above(F32 v, float x) { return vminvq_u32(vcleq_f32(v, set1(x))) == 0; }
PW_INLINE float max(F32 v) { return vmaxvq_f32(v); }

}  // namespace pw
