// Several numbers in one 32-bit word, two bfloat16 or four int8: a vector of words holds more numbers than it has lanes.
#pragma once

#include "kernels/native/simd.h"

namespace pw {

using U32 = uint32_t __attribute__((vector_size(sizeof(F32))));

PW_INLINE F32 lower_halves(F32 words) { return (F32)((U32)words << 16); }
PW_INLINE F32 upper_halves(F32 words) { return (F32)((U32)words & 0xffff0000u); }
PW_INLINE F32 without_upper_halves(F32 words) { return (F32)((U32)words & 0x0000ffffu); }

// Byte 0 (the lowest) to 3 of each word, as a signed number.
PW_INLINE F32 signed_byte(F32 words, int byte) {
    using I32 = int32_t __attribute__((vector_size(sizeof(F32))));
    return (F32)__builtin_convertvector((I32)((U32)words << (24 - 8 * byte)) >> 24, F32);
}

#ifdef __AVX512BF16__
constexpr bool HAS_PAIR_PRODUCTS = true;
#else
constexpr bool HAS_PAIR_PRODUCTS = false;
#endif

// acc + a.lower * b.lower + a.upper * b.upper. Where no instruction does it, it is only good for tests.
PW_INLINE F32 dot_pairs(F32 a, F32 b, F32 acc) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    return fma(upper_halves(a), upper_halves(b), fma(lower_halves(a), lower_halves(b), acc));
#endif
}

PW_INLINE F32 set1_word(uint32_t word) {
    float bits;
    std::memcpy(&bits, &word, 4);
    return set1(bits);
}

}  // namespace pw
