#include <algorithm>
#include <vector>

#include "kernels/linear/int8.h"
#include "kernels/native/parallel.h"

namespace pw::gemm {
namespace {

constexpr int64_t ROWS_PER_CHUNK = 4;
constexpr float LARGEST_CODE = 127;
constexpr int VECTORS = CODE_GROUP / LANES;

// One group: codes, their scale and their sum. A number that is not finite makes the scale NaN, and with it the result.
template <class T>
void encode_group(const T* x, CodeWords::Code* codes, float* scale, int32_t* code_sum) {
    F32 values[VECTORS], size = zero(), poison = zero();
    for (int v = 0; v < VECTORS; ++v) {
        values[v] = load(x + v * LANES);
        size = max(size, max(values[v], zero() - values[v]));
        poison = poison + (values[v] - values[v]);
    }
    const float largest = max(size);
    const F32 inverse = set1(largest > 0 ? LARGEST_CODE / largest : 0);
    F32 total = zero();
    for (int v = 0; v < VECTORS; ++v) {
        const F32 rounded = round(values[v] * inverse);
        CodeWords::store_codes(codes + v * LANES, rounded);
        total = total + rounded;
    }
    *scale = largest / LARGEST_CODE + sum(poison);
    *code_sum = largest > 0 ? int32_t(sum(total)) : 0;
}

struct Room {
    std::vector<CodeWords::Code> codes;
    std::vector<float> scales;
    std::vector<int32_t> sums;
};

}  // namespace

Codes encode(const LinearInput& x, int64_t k) {
    static thread_local Room own;
    Room& room = own;  // of the caller, also where other threads fill it
    const int64_t groups = k / CODE_GROUP;
    if (room.scales.size() < size_t(x.rows * groups)) {
        room.codes.resize(size_t(x.rows * k));
        room.scales.resize(size_t(x.rows * groups));
        room.sums.resize(size_t(x.rows * groups));
    }
    parallel(int((x.rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK), [&](int chunk) {
        const int64_t end = std::min(x.rows, (chunk + 1) * ROWS_PER_CHUNK);
        for (int64_t i = chunk * ROWS_PER_CHUNK * groups; i < end * groups; ++i) {
            const int64_t from = i / groups * x.stride + i % groups * CODE_GROUP;
            CodeWords::Code* codes = room.codes.data() + i * CODE_GROUP;
            if (x.is_bf16)
                encode_group(static_cast<const bf16*>(x.data) + from, codes, &room.scales[size_t(i)], &room.sums[size_t(i)]);
            else
                encode_group(static_cast<const float*>(x.data) + from, codes, &room.scales[size_t(i)], &room.sums[size_t(i)]);
        }
    });
    return {room.codes.data(), room.scales.data(), room.sums.data(), k, groups};
}

}  // namespace pw::gemm
