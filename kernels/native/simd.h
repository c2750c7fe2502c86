// Vectors of float32, the same names at every dispatch level, so that an operation is written once.
//
//   F32            LANES floats; + - * / work on it
//   zero() set1(x)
//   load(p)        from float, bf16 or int8_t, unaligned; load(p, n) reads n < LANES elements and gives 0 for the rest;
//                  from f16 whole vectors only
//   store(p, v)    to float or bf16 (round to nearest even, NaN stays NaN); store(p, v, n) writes n < LANES elements
//   store_i8(p, v) rounds to nearest even and saturates; v must be finite
//   fma(a, b, c)   a * b + c, one rounding;  min, max;  sqrt is scalar
//   sum(v) max(v)  over the lanes, in one fixed order per level
//   any_above(v, x) whether a lane is above x, or NaN
//   exp(v) silu(v) tanh(v)
//
// Everything is compiled with -ffp-contract=off: a product is fused with a sum only where fma() says so, hence a value
// does not depend on where the compiler happened to unroll.
#pragma once

#include <cstdint>
#include <cstring>

#define PW_INLINE inline __attribute__((always_inline))
#define PW_EXPORT extern "C" __attribute__((visibility("default")))

namespace pw {

// bfloat16: the upper half of a float32.
struct bf16 {
    uint16_t bits;
};

// IEEE half precision.
struct f16 {
    uint16_t bits;
};

PW_INLINE float widen(float x) { return x; }
PW_INLINE float widen(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

PW_INLINE void narrow(float x, float* to) { *to = x; }
PW_INLINE void narrow(float x, bf16* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to->bits = uint16_t(is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace pw

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "kernels/native/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "kernels/native/simd_avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "kernels/native/simd_neon.h"
#else
#error "kernels/native: no dispatch level for these compiler flags"
#endif

namespace pw {

// A whole vector, or what is left of one.
template <class T>
PW_INLINE F32 load_or_part(const T* p, int n) {
    return n >= LANES ? load(p) : load(p, n);
}
template <class T>
PW_INLINE void store_or_part(T* p, F32 v, int n) {
    if (n >= LANES)
        store(p, v);
    else
        store(p, v, n);
}

// e^x to about 1 unit in the last place; 0 below -87.33, infinite above 88.7, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts, so that r is exact), e^r by its Taylor polynomial.
PW_INLINE F32 exp(F32 x) {
    const F32 clamped = max(min(x, set1(88.8f)), set1(-87.4f));
    const F32 n = round(clamped * set1(1.44269504088896341f));
    const F32 r = fma(n, set1(-1.42860677e-6f), fma(n, set1(-0.693145752f), clamped));
    F32 p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return keep_nan(x, select_less(x, set1(-87.33f), zero(), times_power_of_two(p, n)));
}

// x / (1 + e^-x)
PW_INLINE F32 silu(F32 x) { return x / (set1(1.0f) + exp(zero() - x)); }

// (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x: no overflow; relative error grows below |x| = 1e-3, where it is x.
PW_INLINE F32 tanh(F32 x) {
    const F32 size = max(x, zero() - x);
    const F32 e = exp(size * set1(-2.0f));
    const F32 far = (set1(1.0f) - e) / (set1(1.0f) + e);
    const F32 square = x * x;
    const F32 near = fma(square * size, fma(square, set1(2.0f / 15), set1(-1.0f / 3)), size);
    return with_sign_of(select_less(size, set1(0.125f), near, far), x);
}

}  // namespace pw
