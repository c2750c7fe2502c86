// Products of weights in the blocks of a GGUF file and int8 activations.
//
// BLOCK numbers of one output feature share a float16 scale and, in Q4_1, a float16 minimum:
// w = (code - zero) * scale [+ minimum]. Activations have one scale per row and BLOCK of k. Within a block the product of
// the codes is exact at every level (int8.h); blocks are added in ascending order in float32.
//
// A panel holds 64 numbers of its columns at a time, so that all words begin at a cache line: the scales of two blocks
// [2][PANEL], their minima [2][PANEL], then the words of one block and of the other. A word of nibbles holds eight codes
// of a column, k ascending: four in the lower halves of its bytes, four in the upper ones.
#pragma once

#include "kernels/linear/int8.h"

namespace pw::gemm {

constexpr int64_t BLOCK = 32;  // of k

struct Bytes {
    static constexpr int PARTS = 1;
    static PW_INLINE F32 decode(F32 words, int) { return words; }
};

struct Nibbles {
    static constexpr int PARTS = 2;
    static PW_INLINE F32 decode(F32 words, int part) { return (F32)((U32)words >> (4 * part) & 0x0f0f0f0fu); }
};

template <class Stored, int32_t ZERO, bool HAS_MINIMUM>
struct BlockCodes {
    static constexpr int64_t GROUP = BLOCK, WORDS = BLOCK / CODES_PER_WORD / Stored::PARTS;
    static constexpr int FACTORS = HAS_MINIMUM ? 2 : 1;
    static constexpr int64_t WORDS_PER_64 = 2 * WORDS + FACTORS;
    static constexpr int32_t OFFSET = ZERO;
    static constexpr int ROWS_AT_ONCE = TILE_ROWS / 2;  // their sums stay in registers beside those of a block's codes
    static constexpr bool IS_NARROW = Stored::PARTS > 1;
    using Wide = BlockCodes<Bytes, ZERO, HAS_MINIMUM>;

    // c[row][column] (stride PANEL) += the product of one panel.
    template <int ROWS, bool IS_FAR>
    static __attribute__((noinline)) void tile(const Codes& x, const float* words, float* c, Ahead ahead) {
        const int64_t stride = x.stride, rows = x.rows, lines = 2 * ahead.lines / x.groups + 1;
        const CodeWords::Code* codes = x.codes;
        const float *scales = x.scales, *sums = x.sums;
        const int32_t* starts = x.starts;
        const float* const end = words + x.groups / 2 * WORDS_PER_64 * PANEL;
        F32 total[ROWS][PANEL_VECTORS];
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < PANEL_VECTORS; ++v) total[r][v] = load(c + r * PANEL + v * LANES);
        while (words < end) {
            const f16* factors = reinterpret_cast<const f16*>(words);
            // From a pointer's distance to `words`: NEAR, or what leads into the next panel.
            const int64_t near = words + NEAR < end ? NEAR : ahead.at - end + NEAR;
            if (IS_FAR)
                for (int64_t i = 0; i < lines; ++i, ahead.at += LINE) __builtin_prefetch(ahead.at, 0, 2);
            else
                for (int v = 0; v < FACTORS * PANEL_VECTORS; ++v) __builtin_prefetch(words + near + v * LANES, 0, 3);
            words += FACTORS * PANEL;
            for (int block = 0; block < 2; ++block, factors += PANEL, scales += rows, starts += rows, sums += rows) {
                CodeWords::Acc acc[ROWS][PANEL_VECTORS];
                for (int r = 0; r < ROWS; ++r)
                    for (int v = 0; v < PANEL_VECTORS; ++v) acc[r][v] = CodeWords::start(starts[r]);
                for (int i = 0; i < WORDS; ++i, words += PANEL) {
                    Words raw, w;
                    for (int v = 0; v < PANEL_VECTORS; ++v) {
                        raw[v] = load(words + v * LANES);
                        if (!IS_FAR) __builtin_prefetch(words + near + v * LANES, 0, 3);
                    }
                    for (int part = 0; part < Stored::PARTS; ++part, codes += CODES_PER_WORD) {
                        for (int v = 0; v < PANEL_VECTORS; ++v) w[v] = Stored::decode(raw[v], part);
                        CodeWords::add<ROWS>(codes, stride, w, acc);
                    }
                }
                for (int v = 0; v < PANEL_VECTORS; ++v) {
                    const F32 factor = load(factors + v * LANES);
                    for (int r = 0; r < ROWS; ++r) {
                        if (HAS_MINIMUM)
                            total[r][v] = fma(load(factors + (2 * PANEL + v * LANES)), set1(sums[r]), total[r][v]);
                        total[r][v] = fma(CodeWords::value(acc[r][v]) * factor, set1(scales[r]), total[r][v]);
                    }
                }
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < PANEL_VECTORS; ++v) store(c + r * PANEL + v * LANES, total[r][v]);
    }

    // Stores `count` times 64 numbers of a panel as Wide holds them: where many rows meet it, unpacking it once is faster.
    static void widen(const float* words, int64_t count, float* to) {
        for (int64_t n = 0; n < count; ++n) {
            std::memcpy(to, words, FACTORS * PANEL * sizeof(float));
            words += FACTORS * PANEL;
            to += FACTORS * PANEL;
            for (int i = 0; i < 2 * WORDS; ++i, words += PANEL)
                for (int part = 0; part < Stored::PARTS; ++part, to += PANEL)
                    for (int v = 0; v < PANEL_VECTORS; ++v)
                        store(to + v * LANES, Stored::decode(load(words + v * LANES), part));
        }
    }
};

using BlockQ8_0 = BlockCodes<Bytes, CodeWords::OFFSET, false>;
using BlockQ4_0 = BlockCodes<Nibbles, 8, false>;
using BlockQ4_1 = BlockCodes<Nibbles, 0, true>;

}  // namespace pw::gemm
