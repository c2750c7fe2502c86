#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/linear/blocks.h"
#include "kernels/native/parallel.h"

namespace pw::gemm {
namespace {

constexpr float LARGEST_CODE = 127;
constexpr float SMALLEST = 1e-30f;  // 127 / a smaller number may overflow: such a group is 0
constexpr int64_t STEP = 16;        // groups: what is done for one need not wait for what was done for the one before

struct Room {
    std::vector<CodeWords::Code> codes;
    std::vector<float> scales, sums;
    std::vector<int32_t> starts;

    void make(int64_t num_codes, int64_t num_groups) {
        if (codes.size() < size_t(num_codes)) codes.resize(size_t(num_codes));
        if (scales.size() >= size_t(num_groups)) return;
        scales.resize(size_t(num_groups));
        sums.resize(size_t(num_groups));
        starts.resize(size_t(num_groups));
    }
};

// AT_ONCE rows that are encoded side by side.
template <class T>
struct Rows {
    const T* numbers[AT_ONCE];
    CodeWords::Code* codes[AT_ONCE];
};

// [groups of a step][AT_ONCE]
struct Step {
    float scales[STEP * AT_ONCE], inverses[STEP * AT_ONCE], totals[STEP * AT_ONCE] = {}, sums[STEP * AT_ONCE];
    int32_t starts[STEP * AT_ONCE];
};

// The largest of SIZE numbers without their signs, in parts.
template <int64_t SIZE>
PW_INLINE F32 largest_size(const float* numbers) {
    F32 most = size_of(load(numbers));
    for (int v = 1; v < SIZE / LANES; ++v) most = larger(most, size_of(load(numbers + v * LANES)));
    return most;
}
template <int64_t SIZE>
PW_INLINE F32 largest_size(const bf16* numbers) {  // twice as many at a time: as whole numbers their order is the same
    using U16 = uint16_t __attribute__((vector_size(sizeof(F32))));
    U16 most = {};
    for (int64_t at = 0; at < SIZE; at += 2 * LANES) {
        U16 some;
        std::memcpy(&some, numbers + at, sizeof(some));
        some &= 0x7fff;
        most = some > most ? some : most;
    }
    return larger(lower_halves((F32)most), upper_halves((F32)most));
}

// Factors of `count` groups from `group` on. A number that is not finite makes the scale NaN, hence the result.
template <int64_t SIZE, class T>
void find_factors(const Rows<T>& rows, int64_t group, int64_t count, Step& step) {
    float sizes[STEP * AT_ONCE] = {};
    for (int64_t g = 0; g < count; ++g) {
        F32 each[AT_ONCE];
        for (int r = 0; r < AT_ONCE; ++r) each[r] = largest_size<SIZE>(rows.numbers[r] + (group + g) * SIZE);
        largest_of_each(each, sizes + g * AT_ONCE);
    }
    for (int64_t i = 0; i < count * AT_ONCE; i += LANES) {
        const F32 size = load(sizes + i);
        store(step.scales + i, size / set1(LARGEST_CODE) + size * zero());
        store(step.inverses + i, select_less(size, set1(SMALLEST), zero(), set1(LARGEST_CODE) / size));
    }
}

// From the totals of `count` groups of codes: what their sums start at, and what they stand for.
void find_sums(int64_t count, int32_t offset, Step& step) {
    using I32 = int32_t __attribute__((vector_size(sizeof(F32))));
    for (int64_t i = 0; i < count * AT_ONCE; i += LANES) {
        const F32 scale = load(step.scales + i), total = load(step.totals + i);
        store(step.sums + i, scale * total);
        // A NaN in the scale makes the result NaN whatever the start is.
        const F32 start = select_less(scale, set1(INFINITY), total * set1(-float(offset)), zero());
        const I32 whole = __builtin_convertvector(start, I32);
        std::memcpy(step.starts + i, &whole, sizeof(whole));
    }
}

// Codes of one group of each row. Answers their sums in `totals`.
template <int64_t SIZE, class T>
void round_group(const Rows<T>& rows, int64_t group, const float* inverses, float* totals) {
    CodeWords::Acc sums[AT_ONCE];
    for (int r = 0; r < AT_ONCE; ++r) {
        F32 scaled[SIZE / LANES];
        for (int v = 0; v < SIZE / LANES; ++v)
            scaled[v] = load(rows.numbers[r] + group * SIZE + v * LANES) * set1(inverses[r]);
        sums[r] = CodeWords::store_codes(rows.codes[r] + group * SIZE, scaled);
    }
    sum_of_each(sums, totals);
}

// `count` of AT_ONCE.
template <class T>
PW_INLINE void copy(const T* from, int64_t count, T* to) {
    if (count == AT_ONCE)
        std::memcpy(to, from, AT_ONCE * sizeof(T));
    else
        for (int64_t r = 0; r < count; ++r) to[r] = from[r];
}

// Rows from `first` on, AT_ONCE or the last ones.
template <int64_t SIZE, class T>
void encode_some(const LinearInput& x, int64_t k, int32_t offset, int64_t first, Room& room) {
    const int64_t count = std::min<int64_t>(AT_ONCE, x.rows - first), groups = k / SIZE;
    Rows<T> rows;
    for (int64_t r = 0; r < AT_ONCE; ++r) {
        const int64_t row = first + std::min(r, count - 1);  // the last one again where there is no other
        rows.numbers[r] = static_cast<const T*>(x.data) + row * x.stride;
        rows.codes[r] = room.codes.data() + row * k;
    }
    Step step;
    for (int64_t group = 0; group < groups; group += STEP) {
        const int64_t some = std::min(STEP, groups - group);
        find_factors<SIZE>(rows, group, some, step);
        for (int64_t g = 0; g < some; ++g)
            round_group<SIZE>(rows, group + g, step.inverses + g * AT_ONCE, step.totals + g * AT_ONCE);
        find_sums(some, offset, step);
        for (int64_t g = 0; g < some; ++g) {
            const size_t at = size_t((group + g) * x.rows + first);
            copy(step.scales + g * AT_ONCE, count, room.scales.data() + at);
            copy(step.sums + g * AT_ONCE, count, room.sums.data() + at);
            copy(step.starts + g * AT_ONCE, count, room.starts.data() + at);
        }
    }
}

// A share of each thread, but no more than the scales of a cache line: threads that write into one wait for each other.
int64_t rows_per_chunk(int64_t rows) {
    const int64_t share = (rows + num_threads() - 1) / num_threads();
    return std::min<int64_t>(LINE, (share + AT_ONCE - 1) / AT_ONCE * AT_ONCE);
}

template <int64_t SIZE, class T>
Codes encode_rows(const LinearInput& x, int64_t k, int32_t offset) {
    static thread_local Room own;
    Room& room = own;  // of the caller, also where other threads fill it
    const int64_t groups = k / SIZE, size = rows_per_chunk(x.rows);
    room.make(x.rows * k, x.rows * groups);
    parallel(int((x.rows + size - 1) / size), [&](int chunk) {
        const int64_t end = std::min(x.rows, (chunk + 1) * size);
        for (int64_t row = chunk * size; row < end; row += AT_ONCE) encode_some<SIZE, T>(x, k, offset, row, room);
    });
    return {room.codes.data(), room.scales.data(), room.starts.data(), room.sums.data(), SIZE, k, groups, x.rows};
}

}  // namespace

template <int64_t SIZE>
Codes encode(const LinearInput& x, int64_t k, int32_t offset) {
    return x.is_bf16 ? encode_rows<SIZE, bf16>(x, k, offset) : encode_rows<SIZE, float>(x, k, offset);
}
template Codes encode<CODE_GROUP>(const LinearInput&, int64_t, int32_t);
template Codes encode<BLOCK>(const LinearInput&, int64_t, int32_t);

}  // namespace pw::gemm
