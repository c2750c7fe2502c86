// Gated activations: act(gate) * up, in float32 with one rounding.
#pragma once

#include "kernels/native/simd.h"

namespace pw {

enum class Gate : int64_t { SILU = 0, GELU_TANH = 1 };

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
PW_INLINE F32 gelu_tanh(F32 x) {
    const F32 inner = set1(0.797884561f) * fma(set1(0.044715f) * x * x, x, x);
    return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

template <Gate GATE>
PW_INLINE F32 gated(F32 gate, F32 up) {
    return (GATE == Gate::SILU ? silu(gate) : gelu_tanh(gate)) * up;
}

// out[i] = act(gate[i]) * up[i] for n numbers; `out` may be `gate`.
template <Gate GATE, class T, class Out>
void gated_row(const T* gate, const T* up, int n, Out* out) {
    for (int i = 0; i < n; i += LANES)
        store_or_part(out + i, gated<GATE>(load_or_part(gate + i, n - i), load_or_part(up + i, n - i)), n - i);
}

}  // namespace pw
