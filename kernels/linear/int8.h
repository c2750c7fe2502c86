// Products of int8 weights and int8 activations.
//
// Weights have one scale per output feature, activations one per row and GROUP of k: w = code * scale, x = code * scale.
// Within a group the product of the codes is exact at every level: integers where the CPU multiplies bytes (VNNI), else
// float32, which holds whole numbers up to 2^24 > 64 * 127 * 127. Groups are added in ascending order in float32.
#pragma once

#include "kernels/linear/across.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/tile.h"

namespace pw::gemm {

constexpr int64_t CODE_GROUP = 64;  // of k
constexpr int CODES_PER_WORD = 4;
using Words = F32[PANEL_VECTORS];  // of one row of a panel, whatever they hold
constexpr int64_t WORDS_PER_GROUP = CODE_GROUP / CODES_PER_WORD;
constexpr int UNROLLED = 2;

#if defined(__AVX512VNNI__)

// vpdpbusd multiplies unsigned bytes by signed ones, so weights are stored plus OFFSET, and a group starts at -OFFSET
// times the sum of its activations.
struct CodeWords {
    using Code = int8_t;
    using Acc = __m512i;
    static constexpr int OFFSET = 128;
    // Stores numbers of at most 127, rounded. Answers their sum in parts.
    template <int VECTORS>
    static PW_INLINE Acc store_codes(Code* to, const F32 (&numbers)[VECTORS]) {
        __m512i codes[VECTORS];
        for (int v = 0; v < VECTORS; ++v) codes[v] = _mm512_cvtps_epi32(numbers[v]);
        if constexpr (VECTORS == 4) {
            const __m512i half = _mm512_packs_epi32(codes[0], codes[1]), rest = _mm512_packs_epi32(codes[2], codes[3]);
            const __m512i mixed = _mm512_packs_epi16(half, rest);  // four of each vector, the next four of each, …
            const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, mixed));
            return _mm512_dpbusd_epi32(start(0), _mm512_set1_epi8(1), mixed);
        }
        Acc sum = start(0);
        for (int v = 0; v < VECTORS; ++v) {
            sum = _mm512_add_epi32(sum, codes[v]);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + v * LANES), _mm512_cvtsepi32_epi8(codes[v]));
        }
        return sum;
    }
    static PW_INLINE Acc start(int32_t first) { return _mm512_set1_epi32(first); }
    static PW_INLINE F32 value(Acc acc) { return _mm512_cvtepi32_ps(acc); }
    template <int ROWS>
    static PW_INLINE void add(const Code* x, int64_t stride, const Words& w, Acc (*acc)[PANEL_VECTORS]) {
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, x + r * stride, 4);
            const __m512i factor = _mm512_set1_epi32(four);
            // The intrinsic makes gcc 12 keep the accumulators in memory.
            for (int v = 0; v < PANEL_VECTORS; ++v) asm("vpdpbusd %2, %1, %0" : "+v"(acc[r][v]) : "v"(w[v]), "v"(factor));
        }
    }
};

#else

struct CodeWords {
    using Code = float;
    using Acc = F32;
    static constexpr int OFFSET = 0;
    template <int VECTORS>
    static PW_INLINE Acc store_codes(Code* to, const F32 (&numbers)[VECTORS]) {
        Acc sum = zero();
        for (int v = 0; v < VECTORS; ++v) {
            const F32 codes = round(numbers[v]);
            sum = sum + codes;
            store(to + v * LANES, codes);
        }
        return sum;
    }
    static PW_INLINE Acc start(int32_t first) { return set1(float(first)); }
    static PW_INLINE F32 value(Acc acc) { return acc; }
    template <int ROWS>
    static PW_INLINE void add(const Code* x, int64_t stride, const Words& words, Acc (*acc)[PANEL_VECTORS]) {
        for (int byte = 0; byte < CODES_PER_WORD; ++byte) {
            Words w;
            for (int v = 0; v < PANEL_VECTORS; ++v) w[v] = signed_byte(words[v], byte);
            for (int r = 0; r < ROWS; ++r) {
                const F32 factor = set1(x[r * stride + byte]);
                for (int v = 0; v < PANEL_VECTORS; ++v) acc[r][v] = fma(factor, w[v], acc[r][v]);
            }
        }
    }
};

#endif

// Activations as codes: row r, group g at codes + r * stride + g * size, with its scale, what its sums start at, and the
// sum of what the codes stand for.
struct Codes {
    const CodeWords::Code* codes;
    const float* scales;    // [groups][rows]
    const int32_t* starts;  // [groups][rows]
    const float* sums;      // [groups][rows]
    int64_t size, stride, groups, rows;

    // `count` groups from `group` on, of the rows from `row` on.
    Codes part(int64_t row, int64_t group, int64_t count) const {
        const int64_t at = group * rows + row;
        return {codes + row * stride + group * size, scales + at, starts + at, sums + at, size, stride, count, rows};
    }
};

// Rows of activations as codes in groups of SIZE, in memory of the calling thread that is good until its next call.
// k: of the weight, a multiple of CODE_GROUP. offset: what the weight's codes are stored plus.
template <int64_t SIZE>
Codes encode(const LinearInput& x, int64_t k, int32_t offset);

// Weights with one scale per output feature: 64 numbers of a column are 16 words, which meet one group of activations.
struct ChannelCodes {
    static constexpr int64_t WORDS_PER_64 = WORDS_PER_GROUP, GROUP = CODE_GROUP;
    static constexpr int32_t OFFSET = CodeWords::OFFSET;
    static constexpr int ROWS_AT_ONCE = TILE_ROWS;
    static constexpr bool IS_NARROW = false;

    // c[row][column] (stride PANEL) += the product of the codes of one panel, with the scales of the activations.
    // Inlined into its callers, GCC 12 keeps accumulators of few rows in memory.
    template <int ROWS, bool IS_FAR>
    static __attribute__((noinline)) void tile(const Codes& x, const float* words, float* c, Ahead ahead) {
        const int64_t groups = x.groups, stride = x.stride, lines = ahead.lines / groups + 1;
        const CodeWords::Code* codes = x.codes;
        const float* scales = x.scales;
        const int32_t* starts = x.starts;
        for (int64_t g = 0; g < groups; ++g, scales += x.rows, starts += x.rows) {
            CodeWords::Acc acc[ROWS][PANEL_VECTORS];
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < PANEL_VECTORS; ++v) acc[r][v] = CodeWords::start(starts[r]);
            if (IS_FAR)
                for (int64_t i = 0; i < lines; ++i, ahead.at += LINE) __builtin_prefetch(ahead.at, 0, 2);
            const float* const end = words + WORDS_PER_GROUP * PANEL;
            // From a pointer's distance to `words`: the next group, or what leads into the next panel.
            const int64_t near = g + 1 < groups ? NEAR : ahead.at - words;
            do {
                if (!IS_FAR)
                    for (int v = 0; v < PANEL_VECTORS; ++v) __builtin_prefetch(words + near + v * LANES, 0, 3);
                for (int i = 0; i < UNROLLED; ++i, words += PANEL, codes += CODES_PER_WORD) {
                    Words w;
                    for (int v = 0; v < PANEL_VECTORS; ++v) w[v] = load(words + v * LANES);
                    CodeWords::add<ROWS>(codes, stride, w, acc);
                }
            } while (words < end);
            asm volatile("" : : : "memory");  // GCC would move c, and with it most accumulators, to the stack
            for (int r = 0; r < ROWS; ++r) {
                const F32 scale = set1(scales[r]);
                for (int v = 0; v < PANEL_VECTORS; ++v) {
                    float* to = c + r * PANEL + v * LANES;
                    store(to, fma(CodeWords::value(acc[r][v]), scale, load(to)));
                }
            }
        }
    }
};

// `Form::tile` for a number of rows known at run time, 1 to Form::ROWS_AT_ONCE.
template <class Form, int ROWS = Form::ROWS_AT_ONCE>
void code_tile_of(int rows, const Codes& x, const float* words, float* c, Ahead ahead) {
    if (rows == ROWS && ahead.is_far())
        Form::template tile<ROWS, true>(x, words, c, ahead);
    else if (rows == ROWS)
        Form::template tile<ROWS, false>(x, words, c, ahead);
    else if constexpr (ROWS > 1)
        code_tile_of<Form, ROWS - 1>(rows, x, words, c, ahead);
}

}  // namespace pw::gemm
