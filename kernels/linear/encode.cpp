#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "kernels/linear/blocks.h"
#include "kernels/native/parallel.h"

namespace pw::gemm {
namespace {

constexpr int64_t ROWS_PER_CHUNK = 4;
constexpr float LARGEST_CODE = 127;
constexpr float SMALLEST = 1e-30f;  // 127 / a smaller number may overflow: such a group is 0

// Of one group, as Codes says. A number that is not finite makes scale and sum NaN, hence the result.
struct Factors {
    float scale, sum;
    int32_t start;
};

template <int64_t SIZE, class T>
Factors encode_group(const T* x, CodeWords::Code* codes, int32_t offset) {
    constexpr int VECTORS = SIZE / LANES;
    F32 values[VECTORS], size = zero(), total = zero();
    for (int v = 0; v < VECTORS; ++v) {
        values[v] = load(x + v * LANES);
        const F32 absolute = max(values[v], zero() - values[v]);
        size = max(size, absolute);
        total = total + absolute;
    }
    const float largest = max(size);
    if (any_above(total, FLT_MAX)) {
        std::fill_n(codes, SIZE, CodeWords::Code{0});
        return {NAN, NAN, 0};
    }
    const F32 inverse = set1(largest < SMALLEST ? 0 : LARGEST_CODE / largest);
    CodeWords::Acc sum = CodeWords::start(0);
    for (int v = 0; v < VECTORS; ++v) CodeWords::store_codes(codes + v * LANES, values[v] * inverse, sum);
    const int32_t sum_of_codes = CodeWords::total(sum);
    const float scale = largest / LARGEST_CODE;
    return {scale, scale * float(sum_of_codes), -offset * sum_of_codes};
}

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

template <int64_t SIZE, class T>
Codes encode_rows(const LinearInput& x, int64_t k, int32_t offset) {
    static thread_local Room own;
    Room& room = own;  // of the caller, also where other threads fill it
    const int64_t groups = k / SIZE;
    room.make(x.rows * k, x.rows * groups);
    parallel(int((x.rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK), [&](int chunk) {
        const int64_t end = std::min(x.rows, (chunk + 1) * ROWS_PER_CHUNK);
        for (int64_t row = chunk * ROWS_PER_CHUNK; row < end; ++row)
            for (int64_t g = 0; g < groups; ++g) {
                const T* from = static_cast<const T*>(x.data) + row * x.stride + g * SIZE;
                const Factors found = encode_group<SIZE>(from, room.codes.data() + row * k + g * SIZE, offset);
                const size_t at = size_t(g * x.rows + row);
                room.scales[at] = found.scale;
                room.sums[at] = found.sum;
                room.starts[at] = found.start;
            }
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
