// A weight as the products read it.
//
// Columns (output features) come in panels of PANEL. A panel holds 32-bit words of GROUP numbers of one column, k
// ascending: [in_features / GROUP][PANEL] words, of float32 (GROUP 1), bfloat16 (GROUP 2) or int8 (GROUP 4, int8.h); of
// weights in blocks, scales and words in turn (blocks.h). Zeros fill up the last panel. A gated weight alternates panels of the gate's half of the columns and of the other half.
#pragma once

#include <cstdint>

#include "kernels/native/simd.h"

namespace pw {

namespace gemm {

#if defined(__AVX512F__)
constexpr int PANEL_VECTORS = 3, TILE_ROWS = 8;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int PANEL_VECTORS = 2, TILE_ROWS = 6;  // 12 of 16
#else
constexpr int PANEL_VECTORS = 4, TILE_ROWS = 6;  // 24 of 32
#endif
constexpr int PANEL = PANEL_VECTORS * LANES;

}  // namespace gemm

enum WeightKind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, Q8_0 = 3, Q4_0 = 4, Q4_1 = 5 };

// As kernels/linear/native.py lays it out.
struct PackedWeight {
    const float* panels;  // words, whatever they hold
    const float* scales;  // of int8, [out_features]; else null
    int64_t out_features, in_features;
    WeightKind kind;
    int64_t is_gated;

    // Of a panel, by column and 64 numbers.
    int64_t words_per_64() const {
        constexpr int64_t WORDS[] = {64, 32, 16, 17, 9, 10};
        return WORDS[kind];
    }
    int64_t columns() const { return is_gated ? out_features / 2 : out_features; }
    int64_t column_panels() const { return (columns() + gemm::PANEL - 1) / gemm::PANEL; }
    int64_t panel_words() const { return in_features * words_per_64() / 64 * gemm::PANEL; }
    int64_t parts() const { return is_gated ? 2 : 1; }
    const float* panel(int64_t at, int64_t part) const { return panels + (at * parts() + part) * panel_words(); }
};

}  // namespace pw
