// Products with a packed weight.
#pragma once

#include "kernels/gated/gated.h"
#include "kernels/linear/weight.h"

namespace pw {

// Where a product goes: data = product [+ bias] [, activated gate times the rest] [, soft-capped] [+ residual].
struct LinearOutput {
    void* data;             // [rows, columns] float32 or bfloat16
    int64_t stride;         // elements between rows
    int64_t is_bf16;
    const float* bias;      // [out_features] or null
    const float* residual;  // [rows, columns] with `stride`, may be `data`; or null
    Gate activation;  // of gated weights
    float soft_cap;         // c: x becomes c tanh(x / c); 0: none
};

// x: [rows, in_features], float32, or bfloat16 where HAS_PAIR_PRODUCTS and the weight is bfloat16.
struct LinearInput {
    const void* data;
    int64_t rows, stride, is_bf16;
};

// Largest number of a row and its column, the first of equal ones. If a NaN is in the row, value is NaN.
struct Largest {
    float value;
    int32_t column;
};

// Shares the work with the threads of the library.
void linear(const PackedWeight& weight, const LinearInput& x, const LinearOutput& out);

// largest[row] of what `linear` would store as float32, which is stored nowhere.
void linear_argmax(const PackedWeight& weight, const LinearInput& x, float soft_cap, Largest* largest);

}  // namespace pw
