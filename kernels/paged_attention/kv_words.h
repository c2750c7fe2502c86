// How words of the packed KV cache meet queries and weights: one struct per pair of stored type and product.
//
// Packed layout of one (block, kv head) run, as 32-bit words of `GROUP` numbers: K [head_dim / GROUP][block_size] and
// V [block_size / GROUP][head_dim]. A vector of K holds one group of dimensions of many tokens, a vector of V one group
// of tokens in many dimensions, so no sum runs across lanes.
//
// An int8 run holds bytes, K [head_dim][block_size] and V [block_size][head_dim], then a bfloat16 scale per token. Scales
// meet scores and weights, not keys and values.
//
// An accumulator takes its terms one by one in ascending order, whatever tile it is part of: what a row computes depends
// on neither tile nor batch.
#pragma once

#include "kernels/native/pairs.h"

namespace pw {

// float32 in the cache.
struct Float32Words {
    using Word = float;  // what a vector of `load` is made of
    static constexpr int GROUP = 1;    // numbers in a word
    static constexpr int FACTORS = 1;  // factors that meet a word
    using Factor = float;
    using Line = F32;
    static PW_INLINE Line decode(F32 words) { return words; }
    static PW_INLINE F32 add(const Factor* f, Line line, F32 acc) { return fma(set1(*f), line, acc); }
    static PW_INLINE F32 add_first(const Factor* f, Line line, F32 acc) { return add(f, line, acc); }
};

// bfloat16 in the cache, widened in registers; queries and weights stay float32.
struct WidenedWords {
    using Word = float;
    static constexpr int GROUP = 2;
    static constexpr int FACTORS = 2;
    using Factor = float;
    struct Line {
        F32 first, second;
    };
    static PW_INLINE Line decode(F32 words) { return {lower_halves(words), upper_halves(words)}; }
    static PW_INLINE F32 add(const Factor* f, const Line& line, F32 acc) {
        return fma(set1(f[1]), line.second, fma(set1(f[0]), line.first, acc));
    }
    // The second number of the word takes no part: it may be NaN.
    static PW_INLINE F32 add_first(const Factor* f, const Line& line, F32 acc) {
        return fma(set1(f[0]), line.first, acc);
    }
};

// bfloat16 in the cache, queries and weights, multiplied in pairs.
struct PairWords {
    using Word = float;
    static constexpr int GROUP = 2;
    static constexpr int FACTORS = 1;
    using Factor = uint32_t;
    using Line = F32;
    static PW_INLINE Line decode(F32 words) { return words; }
    static PW_INLINE F32 add(const Factor* f, Line line, F32 acc) { return dot_pairs(set1_word(*f), line, acc); }
    static PW_INLINE F32 add_first(const Factor* f, Line line, F32 acc) {
        return add(f, without_upper_halves(line), acc);
    }
};

// int8 codes in the cache, widened when they are loaded.
struct CodeWords : Float32Words {
    using Word = int8_t;
};

template <class Words>
constexpr bool HAS_SCALES = sizeof(typename Words::Word) == 1;

}  // namespace pw
