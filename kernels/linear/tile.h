// The inner product: a few rows of activations times one panel, in registers.
//
// An accumulator takes its terms one by one, k ascending, each with one rounding. So a row's result depends neither on
// the rows that share its tile nor on where k was cut, and float32 weights give the same bits as equal bfloat16 ones.
#pragma once

#include "kernels/linear/weight.h"
#include "kernels/native/pairs.h"

namespace pw::gemm {

// How words meet activations: one struct per pair of stored type and product.
struct Float32Words {
    using Input = float;
    static constexpr int GROUP = 1, PASSES = 1;
    static PW_INLINE F32 decode(F32 words, int) { return words; }
    static PW_INLINE F32 factor(const Input* x, int) { return set1(*x); }
    static PW_INLINE F32 add(F32 x, F32 w, F32 acc) { return fma(x, w, acc); }
};

// bfloat16 weights, widened in registers; float32 activations.
struct WidenedWords {
    using Input = float;
    static constexpr int GROUP = 2, PASSES = 2;
    static PW_INLINE F32 decode(F32 words, int pass) { return pass == 0 ? lower_halves(words) : upper_halves(words); }
    static PW_INLINE F32 factor(const Input* x, int pass) { return set1(x[pass]); }
    static PW_INLINE F32 add(F32 x, F32 w, F32 acc) { return fma(x, w, acc); }
};

// bfloat16 weights and activations, multiplied in pairs by the instruction for it.
struct PairWords {
    using Input = bf16;
    static constexpr int GROUP = 2, PASSES = 1;
    static PW_INLINE F32 decode(F32 words, int) { return words; }
    static PW_INLINE F32 factor(const Input* x, int) {
        uint32_t word;
        std::memcpy(&word, x, 4);
        return set1_word(word);
    }
    static PW_INLINE F32 add(F32 x, F32 w, F32 acc) { return dot_pairs(x, w, acc); }
};

// Memory that will be needed next: each tile of a panel asks for `lines` lines of it in the course of its work, so that it
// is in the second-level cache by then. A panel's only tile needs what it reads too soon for that: it has no lines to ask
// for, and looks a little ahead, at the end of its panel into the next one.
struct Ahead {
    const float* at;
    int64_t lines;
    bool is_far() const { return lines > 0; }
};

constexpr int64_t BURST = 4;                      // words of a column between two requests
constexpr int NEAR = 16 * PANEL;                  // how far an only tile looks ahead: a group of int8 (int8.h)
constexpr int LINE = 64 / int(sizeof(float));     // of a cache, in floats

// c[row][column] (stride PANEL) += x[row] . panel over `groups` >= 1 words of k.
template <class Words, int ROWS, bool IS_FAR>
void tile(const typename Words::Input* x, int64_t stride, const float* words, int64_t groups, float* c, Ahead ahead) {
    F32 acc[ROWS][PANEL_VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < PANEL_VECTORS; ++v) acc[r][v] = load(c + r * PANEL + v * LANES);
    const int64_t lines = ahead.lines * BURST / (groups + BURST - 1) + 1;  // of a burst
    const float* const end = words + groups * PANEL;
    do {
        const float* const stop = words + BURST * PANEL < end ? words + BURST * PANEL : end;
        if (IS_FAR)
            for (int64_t i = 0; i < lines; ++i, ahead.at += LINE) __builtin_prefetch(ahead.at, 0, 2);
        // From a pointer's distance to `words`: NEAR, or what leads into the next panel.
        const int64_t near = words + NEAR < end ? NEAR : ahead.at - end + NEAR;
        do {
            F32 raw[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; ++v) {
                raw[v] = load(words + v * LANES);
                if (!IS_FAR) __builtin_prefetch(words + near + v * LANES, 0, 3);
            }
            for (int pass = 0; pass < Words::PASSES; ++pass) {
                F32 w[PANEL_VECTORS];
                for (int v = 0; v < PANEL_VECTORS; ++v) w[v] = Words::decode(raw[v], pass);
                for (int r = 0; r < ROWS; ++r) {
                    const F32 factor = Words::factor(x + r * stride, pass);
                    for (int v = 0; v < PANEL_VECTORS; ++v) acc[r][v] = Words::add(factor, w[v], acc[r][v]);
                }
            }
            words += PANEL;
            x += Words::GROUP;
        } while (words < stop);
    } while (words < end);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < PANEL_VECTORS; ++v) store(c + r * PANEL + v * LANES, acc[r][v]);
}

// `tile` for a number of rows known at run time, 1 to TILE_ROWS.
template <class Words, int ROWS = TILE_ROWS>
void tile_of(int rows, const typename Words::Input* x, int64_t stride, const float* words, int64_t groups, float* c,
             Ahead ahead) {
    if (rows == ROWS && ahead.is_far())
        tile<Words, ROWS, true>(x, stride, words, groups, c, ahead);
    else if (rows == ROWS)
        tile<Words, ROWS, false>(x, stride, words, groups, c, ahead);
    else if constexpr (ROWS > 1)
        tile_of<Words, ROWS - 1>(rows, x, stride, words, groups, c, ahead);
}

}  // namespace pw::gemm
