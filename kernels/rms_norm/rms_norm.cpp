#include "kernels/rms_norm/rms_norm.h"

#include <algorithm>

#include "kernels/native/parallel.h"

namespace {

constexpr int ROWS = 8;  // of a chunk

template <class T>
void rms_norm(const T* x, T* residual, const float* weight, float eps, int rows, int n, T* out) {
    pw::parallel((rows + ROWS - 1) / ROWS, [=](int chunk) {
        for (int64_t row = chunk * ROWS; row < std::min(rows, (chunk + 1) * ROWS); ++row)
            if (residual != nullptr)
                pw::add_rms_norm_row(x + row * n, residual + row * n, weight, eps, n, out + row * n);
            else
                pw::rms_norm_row(x + row * n, weight, eps, n, out + row * n);
    });
}

}  // namespace

// x, out, residual (or null; changed): [rows][n] of one type; weight: [n] float32.
PW_EXPORT void pw_rms_norm(const void* x, void* residual, const float* weight, float eps, int64_t rows, int64_t n,
                           int64_t is_bfloat16, void* out) {
    if (is_bfloat16)
        rms_norm(static_cast<const pw::bf16*>(x), static_cast<pw::bf16*>(residual), weight, eps, int(rows), int(n),
                 static_cast<pw::bf16*>(out));
    else
        rms_norm(static_cast<const float*>(x), static_cast<float*>(residual), weight, eps, int(rows), int(n),
                 static_cast<float*>(out));
}
