// The cutoff of min_p, top_k and top_p in one row, without sorting it.
//
// A threshold that the cutoff cannot lie below is found from sums and from the maxima of families; of what reaches it,
// the cutoff is selected among the few tokens near it.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/native/simd.h"

namespace pw {

// Neighbouring tokens, as race.py has them.
constexpr int FAN_OUT = 64;

// One row: scaled logits, the largest of which is 0, padded with -inf to whole families.
struct ScaledRow {
    const float* values;  // [families][FAN_OUT]
    const float* maxima;  // [families]
    int families;
    int vocab_size;
};

struct Candidate {
    float value;
    float weight;
};

PW_INLINE F32 weights_from(const float* values, float lowest) {
    const F32 v = load(values);
    return select_less(v, set1(lowest), zero(), exp(v));
}

// Sum of e^value of a family over the values that are at least `lowest`.
PW_INLINE float family_weight(const float* values, float lowest) {
    F32 total = zero();
    for (int i = 0; i < FAN_OUT; i += LANES) total = total + weights_from(values + i, lowest);
    return sum(total);
}

// Calls take(value) for every value that is at least `lowest`.
template <class Take>
void for_each_from(const ScaledRow& row, float lowest, const Take& take) {
    for (int f = 0; f < row.families; ++f) {
        if (!(row.maxima[f] >= lowest)) continue;
        for (int i = 0; i < FAN_OUT; ++i)
            if (row.values[f * FAN_OUT + i] >= lowest) take(row.values[f * FAN_OUT + i]);
    }
}

inline double total_weight(const ScaledRow& row, float lowest) {
    double total = 0;
    for (int f = 0; f < row.families; ++f)
        if (row.maxima[f] >= lowest) total += family_weight(row.values + f * FAN_OUT, lowest);
    return total;
}

// The k-th largest value. room: [families * FAN_OUT].
inline float kth_largest(const ScaledRow& row, int k, float* room) {
    float reached = -INFINITY;
    if (k <= row.families) {  // k families have a value that is at least the k-th largest maximum
        std::copy(row.maxima, row.maxima + row.families, room);
        std::nth_element(room, room + k - 1, room + row.families, std::greater<>());
        reached = room[k - 1];
    }
    int count = 0;
    for_each_from(row, reached, [&](float value) { room[count++] = value; });
    std::nth_element(room, room + k - 1, room + count, std::greater<>());
    return room[k - 1];
}

// The smallest value v such that what lies above v weighs less than `wanted`. Reorders the candidates.
inline float edge_of_nucleus(Candidate* first, Candidate* end, double wanted) {
    float edge = first->value;
    double above = 0;  // weight of what is known to lie above the candidates that are left
    while (first < end) {
        const float pivot = first[(end - first) / 2].value;
        Candidate* const equal = std::partition(first, end, [=](const Candidate& c) { return c.value > pivot; });
        Candidate* const below = std::partition(equal, end, [=](const Candidate& c) { return c.value == pivot; });
        double weight = above;
        for (const Candidate* c = first; c < equal; ++c) weight += c->weight;
        if (weight >= wanted) {
            end = equal;
            continue;
        }
        edge = pivot;
        for (const Candidate* c = equal; c < below; ++c) weight += c->weight;
        if (weight >= wanted) break;
        above = weight;
        first = below;
    }
    return edge;
}

// Values from `lowest` to 0 in ranges of equal width, the largest first; what lies below `lowest` is in the one after
// the last.
struct Ranges {
    static constexpr int COUNT = 256;
    float lowest;
    float per_unit;

    explicit Ranges(float lowest) : lowest(lowest), per_unit(COUNT / std::max(-lowest, 1e-6f)) {}
    F32 of(F32 values) const {
        const F32 range = min((zero() - values) * set1(per_unit), set1(COUNT - 0.5f));
        return select_less(values, set1(lowest), set1(COUNT), range);
    }
};

// Calls take(value, weight, range) for all tokens of families that reach the ranges.
template <class Take>
void for_each_in(const ScaledRow& row, const Ranges& ranges, const Take& take) {
    alignas(64) float weights[FAN_OUT], numbers[FAN_OUT];
    for (int f = 0; f < row.families; ++f) {
        if (!(row.maxima[f] >= ranges.lowest)) continue;
        const float* values = row.values + f * FAN_OUT;
        for (int i = 0; i < FAN_OUT; i += LANES) {
            store(weights + i, exp(load(values + i)));
            store(numbers + i, ranges.of(load(values + i)));
        }
        for (int i = 0; i < FAN_OUT; ++i) take(values[i], weights[i], int(numbers[i]));
    }
}

// The edge of the smallest set of largest values that weighs `top_p` of all from `lowest` on. What lies below the edge
// weighs 1 - top_p of the total at most, and each of these values less than the edge: so the edge weighs more than their
// average if all tokens were among them. room: [families * FAN_OUT].
inline float nucleus(const ScaledRow& row, float lowest, float top_p, Candidate* room) {
    const double total = total_weight(row, lowest), wanted = top_p * total;
    const double least = 0.99 * (total - wanted) / row.vocab_size;  // 0.99: sums are rounded
    if (!(least > 0)) return lowest;
    const Ranges ranges(std::max(lowest, float(std::log(least))));
    double weight[Ranges::COUNT + 1] = {};
    for_each_in(row, ranges, [&](float, float w, int range) { weight[range] += w; });
    int edge = 0;
    double above = 0;
    for (; edge < Ranges::COUNT && above + weight[edge] < wanted; ++edge) above += weight[edge];
    int count = 0;
    for_each_in(row, ranges, [&](float value, float w, int range) {
        room[count] = {value, w};
        count += range == edge;
    });
    return edge < Ranges::COUNT ? edge_of_nucleus(room, room + count, wanted - above) : ranges.lowest;
}

}  // namespace pw
