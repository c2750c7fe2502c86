// One token per row, drawn from its softmax after the filters, as api.py says.
#include "kernels/native/parallel.h"
#include "kernels/sampling/filters.h"

namespace pw {
namespace {

constexpr int MAX_LEVELS = 6;

struct Filter {
    float temperature;
    int64_t top_k;  // 0 or less: all
    float top_p;    // 1: all
    float min_p;    // 0: all
};

int families_of(int size) { return (size + FAN_OUT - 1) / FAN_OUT; }

// Memory of one row, all parts in whole families.
struct Room {
    float* values;
    float* others;
    Candidate* candidates;
    float* maxima;
    float* sums[MAX_LEVELS];  // weights of families, of families of families, …, up to the children of the root
    int num_sums;
};

Room make_room(int vocab_size) {
    const size_t padded = size_t(families_of(vocab_size)) * FAN_OUT;
    const size_t above = size_t(families_of(families_of(vocab_size)) + MAX_LEVELS) * FAN_OUT;  // of every level
    Room room;
    room.values = static_cast<float*>(scratch((4 * padded + 3 * above + FAN_OUT) * sizeof(float)));
    room.others = room.values + padded;
    room.candidates = reinterpret_cast<Candidate*>(room.others + padded);
    room.maxima = reinterpret_cast<float*>(room.candidates + padded) + FAN_OUT;  // a candidate may be written past the last
    float* memory = room.maxima + above;
    room.num_sums = 0;
    for (int size = families_of(vocab_size); size > 1; size = families_of(size)) {
        room.sums[room.num_sums++] = memory;
        memory += families_of(size) * FAN_OUT;
    }
    return room;
}

float largest_of(const float* values, int n) {
    F32 best = set1(-INFINITY);
    int i = 0;
    for (; i + LANES <= n; i += LANES) best = max(load(values + i), best);
    float largest = max(best);
    for (; i < n; ++i) largest = std::max(largest, values[i]);
    return largest;
}

// (logit - largest) / temperature; a NaN becomes -inf.
ScaledRow scale(const float* logits, int vocab_size, float temperature, const Room& room) {
    const F32 largest = set1(largest_of(logits, vocab_size)), heat = set1(temperature), none = set1(-INFINITY);
    for (int i = 0; i < vocab_size; i += LANES)
        store(room.values + i, max((load_or_part(logits + i, vocab_size - i) - largest) / heat, none));
    const int families = families_of(vocab_size);
    std::fill(room.values + vocab_size, room.values + families * FAN_OUT, -INFINITY);
    for (int f = 0; f < families; ++f) {
        F32 best = none;
        for (int i = 0; i < FAN_OUT; i += LANES) best = max(load(room.values + f * FAN_OUT + i), best);
        room.maxima[f] = max(best);
    }
    return {room.values, room.maxima, families, vocab_size};
}

float cutoff(const ScaledRow& row, const Filter& filter, const Room& room) {
    float lowest = filter.min_p > 0 ? std::log(filter.min_p) : -INFINITY;
    if (filter.top_k > 0 && filter.top_k < row.vocab_size)
        lowest = std::max(lowest, kth_largest(row, int(filter.top_k), room.others));
    return filter.top_p < 1 ? std::max(lowest, nucleus(row, lowest, filter.top_p, room.candidates)) : lowest;
}

// The first child to arrive: the largest weight by time.
int winner(const float* weights, const double* times) {
    int best = 0;
    for (int i = 1; i < FAN_OUT; ++i)
        if (weights[i] / times[i] > weights[best] / times[best]) best = i;
    return best;
}

void sum_families(const ScaledRow& row, float lowest, const Room& room) {
    int size = row.families;
    for (int level = 0; level < room.num_sums; ++level, size = families_of(size)) {
        float* const out = room.sums[level];
        for (int f = 0; f < size; ++f) {
            if (level == 0) {
                out[f] = row.maxima[f] >= lowest ? family_weight(row.values + f * FAN_OUT, lowest) : 0;
                continue;
            }
            F32 total = zero();
            for (int i = 0; i < FAN_OUT; i += LANES) total = total + load(room.sums[level - 1] + f * FAN_OUT + i);
            out[f] = sum(total);
        }
        std::fill(out + size, out + families_of(size) * FAN_OUT, 0.0f);
    }
}

// times: [levels][FAN_OUT], those of the root's children first.
int64_t race(const ScaledRow& row, float lowest, const Room& room, const double* times) {
    sum_families(row, lowest, room);
    int64_t node = 0;
    for (int level = room.num_sums - 1; level >= 0; --level, times += FAN_OUT)
        node = node * FAN_OUT + winner(room.sums[level] + node * FAN_OUT, times);
    alignas(64) float weights[FAN_OUT];
    for (int i = 0; i < FAN_OUT; i += LANES) store(weights + i, weights_from(row.values + node * FAN_OUT + i, lowest));
    return std::min<int64_t>(node * FAN_OUT + winner(weights, times), row.vocab_size - 1);
}

}  // namespace
}  // namespace pw

// logits: [any][vocab_size] with `stride`, of which row at[i] is the i-th of `rows`, or row i if `at` is null; times: [rows][num_levels][FAN_OUT]; out: [rows].
PW_EXPORT void pw_sample(const float* logits, int64_t stride, const int64_t* at, int64_t rows, int64_t vocab_size,
                         const float* temperature, const int64_t* top_k, const float* top_p, const float* min_p,
                         const double* times, int64_t num_levels, int64_t* out) {
    pw::parallel(int(rows), [=](int row) {
        const pw::Room room = pw::make_room(int(vocab_size));
        const float* const own = logits + (at ? at[row] : row) * stride;
        const pw::ScaledRow scaled = pw::scale(own, int(vocab_size), temperature[row], room);
        const float lowest = pw::cutoff(scaled, {temperature[row], top_k[row], top_p[row], min_p[row]}, room);
        out[row] = pw::race(scaled, lowest, room, times + row * num_levels * pw::FAN_OUT);
    });
}
