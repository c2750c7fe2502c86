// RMSNorm of one row, with the sum of a residual if there is one. Statistics and products in float32, one rounding.
#pragma once

#include <cmath>

#include "kernels/native/simd.h"

namespace pw {

// 1 / sqrt(mean of squares + eps) of n numbers.
template <class T>
float inverse_rms(const T* x, int n, float eps) {
    F32 squares = zero();
    for (int i = 0; i < n; i += LANES) {
        const F32 v = load_or_part(x + i, n - i);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / float(n) + eps);
}

// out = x * inverse_rms(x) * weight. `out` may be `x`. Gemma's `1 + weight` is added when weights are loaded.
template <class T, class Out>
void rms_norm_row(const T* x, const float* weight, float eps, int n, Out* out) {
    const F32 scale = set1(inverse_rms(x, n, eps));
    for (int i = 0; i < n; i += LANES)
        store_or_part(out + i, load_or_part(x + i, n - i) * scale * load_or_part(weight + i, n - i), n - i);
}

// residual = residual + x, rounded as it is stored; out = rms_norm_row(residual).
template <class T, class Residual, class Out>
void add_rms_norm_row(const T* x, Residual* residual, const float* weight, float eps, int n, Out* out) {
    for (int i = 0; i < n; i += LANES)
        store_or_part(residual + i, load_or_part(residual + i, n - i) + load_or_part(x + i, n - i), n - i);
    rms_norm_row(residual, weight, eps, n, out);
}

}  // namespace pw
