// Scores of one split become weights; partial results of splits become one.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/native/pairs.h"
#include "kernels/paged_attention/ahead.h"

namespace pw {

// Sum of exponentials and largest score of a row over the tokens so far.
struct Softmax {
    float largest;
    float sum;
};

// Tokens of a split that a query sees.
struct Span {
    int first, end;
    bool is_empty() const { return end <= first; }
};

// 0, 1, 2, …
PW_INLINE F32 lane_numbers() {
    static const float numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}

PW_INLINE F32 cap(F32 score, float soft_cap) {
    return soft_cap > 0 ? set1(soft_cap) * tanh(score * set1(1 / soft_cap)) : score;
}

// -inf for tokens outside of the span; the first lane is `token`.
PW_INLINE F32 within(Span span, int token, F32 scores) {
    const F32 tokens = lane_numbers() + set1(float(token)), none = set1(-INFINITY);
    return select_less(tokens, set1(float(span.first)), none,
                       select_less(tokens, set1(float(span.end)), scores, none));
}

// Raw scores become scaled ones, -inf outside of the span; answers the largest.
inline float scale_scores(float* scores, Span span, float scale, float soft_cap, Ahead& ahead) {
    F32 largest = set1(-INFINITY);
    for (int t = 0; t < span.end; t += LANES) {
        ahead.step(lines_beside(2));
        F32 s = cap(load(scores + t) * set1(scale), soft_cap);
        if (t < span.first || t + LANES > span.end) s = within(span, t, s);
        largest = max(s, largest);
        store(scores + t, s);
    }
    return max(largest);
}

// Scores of a row become weights e^(score - largest), 0 outside of the span.
//
//   scores    [num_tokens, rounded up to a whole vector]; overwritten
//   weights   the same room; may be `scores`
inline Softmax softmax_row(float* scores, float* weights, int num_tokens, Span span, float scale, float soft_cap,
                           Ahead& ahead) {
    const int seen = span.is_empty() ? 0 : span.end;
    Softmax row{-INFINITY, 0};
    F32 sum = zero();
    if (seen > 0) row.largest = scale_scores(scores, span, scale, soft_cap, ahead);
    int t = 0;
    for (; t < seen; t += LANES) {
        ahead.step(lines_beside(2));
        const F32 weight = exp(load(scores + t) - set1(row.largest));
        sum = sum + weight;
        store(weights + t, weight);
    }
    for (; t < num_tokens; t += LANES) store(weights + t, zero());
    row.sum = pw::sum(sum);
    return row;
}

// The same with weights in bfloat16, two in a word; the sum is that of the rounded weights.
inline Softmax softmax_row(float* scores, uint32_t* words, int num_tokens, Span span, float scale, float soft_cap,
                           Ahead& ahead) {
    bf16* weights = reinterpret_cast<bf16*>(words);
    const Softmax row = softmax_row(scores, scores, num_tokens, span, scale, soft_cap, ahead);
    F32 sum = zero();
    for (int t = 0; t < num_tokens; t += LANES) {
        store(weights + t, load(scores + t));
        sum = sum + load(weights + t);
    }
    return {row.largest, pw::sum(sum)};
}

// Merges the next partial result of a row into `state`. An empty one changes nothing.
inline void merge(Softmax& row, float* state, const Softmax& next, const float* partial, int head_dim) {
    if (next.sum == 0) return;
    const float largest = std::max(next.largest, row.largest);
    alignas(64) float factors[LANES] = {};
    factors[0] = row.largest - largest;
    factors[1] = next.largest - largest;
    store(factors, exp(load(factors)));
    const F32 old = set1(factors[0]), added = set1(factors[1]);
    for (int d = 0; d < head_dim; d += LANES) store(state + d, fma(load(partial + d), added, load(state + d) * old));
    row = {largest, next.sum * factors[1] + row.sum * factors[0]};
}

}  // namespace pw
