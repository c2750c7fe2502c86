#include "kernels/gated/gated.h"

#include <algorithm>

#include "kernels/native/parallel.h"

namespace {

constexpr int ROWS = 4;  // of a chunk

template <pw::Gate GATE, class T>
void gate_rows(const void* gate_up, int rows, int n, void* out) {
    const T* from = static_cast<const T*>(gate_up);
    T* to = static_cast<T*>(out);
    pw::parallel((rows + ROWS - 1) / ROWS, [=](int chunk) {
        for (int64_t row = chunk * ROWS; row < std::min(rows, (chunk + 1) * ROWS); ++row)
            pw::gated_row<GATE>(from + 2 * row * n, from + (2 * row + 1) * n, n, to + row * n);
    });
}

}  // namespace

// gate_up: [rows][2][n], out: [rows][n] of the same type; gate: a value of pw::Gate.
PW_EXPORT void pw_gated(const void* gate_up, int64_t rows, int64_t n, int64_t is_bfloat16, int64_t gate, void* out) {
    using pw::Gate;
    const bool is_silu = Gate(gate) == Gate::SILU;
    const auto run = is_bfloat16 ? (is_silu ? gate_rows<Gate::SILU, pw::bf16> : gate_rows<Gate::GELU_TANH, pw::bf16>)
                                 : (is_silu ? gate_rows<Gate::SILU, float> : gate_rows<Gate::GELU_TANH, float>);
    run(gate_up, int(rows), int(n), out);
}
