// A vector as int8 codes and one scale: code = round(x / scale), scale = largest |x| / 127 in bfloat16 (kernels/kv_layout/codes.py).
#pragma once

#include "kernels/native/simd.h"

namespace pw {

// Codes of x[0 … dim) at to[0], to[stride], …; x has room up to a whole vector. A number that is not finite makes the scale NaN.
inline void encode_vector(const float* x, int dim, int8_t* to, int stride, bf16* scale) {
    constexpr float LARGEST_CODE = 127;
    F32 size = zero(), poison = zero();
    for (int d = 0; d < dim; d += LANES) {
        const F32 values = load_or_part(x + d, dim - d);
        size = max(size, max(values, zero() - values));
        poison = poison + values * zero();
    }
    narrow(max(size) / LARGEST_CODE + sum(poison), scale);
    const float stored = widen(*scale);
    for (int d = 0; d < dim; d += LANES) {
        const F32 codes = stored > 0 ? load_or_part(x + d, dim - d) / set1(stored) : zero();
        int8_t some[LANES];
        store_i8(some, round(max(min(codes, set1(LARGEST_CODE)), set1(-LARGEST_CODE))));
        for (int i = 0; i < LANES && d + i < dim; ++i) to[(d + i) * stride] = some[i];
    }
}

}  // namespace pw
