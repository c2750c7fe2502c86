#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "kernels/linear/int8.h"
#include "kernels/native/parallel.h"

namespace pw::gemm {
namespace {

constexpr int64_t ROWS_PER_CHUNK = 4;
constexpr float LARGEST_CODE = 127;
constexpr float SMALLEST = 1e-30f;  // 127 / a smaller number may overflow: such a group is 0
constexpr int VECTORS = CODE_GROUP / LANES;

// One group: codes, their scale and what products with it start at. A number that is not finite makes the scale NaN,
// hence the result.
template <class T>
void encode_group(const T* x, CodeWords::Code* codes, float* scale, int32_t* start) {
    F32 values[VECTORS], size = zero(), total = zero();
    for (int v = 0; v < VECTORS; ++v) {
        values[v] = load(x + v * LANES);
        const F32 absolute = max(values[v], zero() - values[v]);
        size = max(size, absolute);
        total = total + absolute;
    }
    const float largest = max(size);
    const bool is_finite = !any_above(total, FLT_MAX);
    const F32 inverse = set1(largest < SMALLEST || !is_finite ? 0 : LARGEST_CODE / largest);
    CodeWords::Acc sum = CodeWords::start(0);
    for (int v = 0; v < VECTORS; ++v) CodeWords::store_codes(codes + v * LANES, values[v] * inverse, sum);
    *scale = is_finite ? largest / LARGEST_CODE : NAN;
    *start = is_finite ? CodeWords::first(sum) : 0;
}

struct Room {
    std::vector<CodeWords::Code> codes;
    std::vector<float> scales;
    std::vector<int32_t> starts;
};

}  // namespace

Codes encode(const LinearInput& x, int64_t k) {
    static thread_local Room own;
    Room& room = own;  // of the caller, also where other threads fill it
    const int64_t groups = k / CODE_GROUP;
    if (room.scales.size() < size_t(x.rows * groups)) {
        room.codes.resize(size_t(x.rows * k));
        room.scales.resize(size_t(x.rows * groups));
        room.starts.resize(size_t(x.rows * groups));
    }
    parallel(int((x.rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK), [&](int chunk) {
        const int64_t end = std::min(x.rows, (chunk + 1) * ROWS_PER_CHUNK);
        for (int64_t row = chunk * ROWS_PER_CHUNK; row < end; ++row)
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t from = row * x.stride + g * CODE_GROUP;
                CodeWords::Code* codes = room.codes.data() + (row * groups + g) * CODE_GROUP;
                float* scale = &room.scales[size_t(g * x.rows + row)];
                int32_t* start = &room.starts[size_t(g * x.rows + row)];
                if (x.is_bf16)
                    encode_group(static_cast<const bf16*>(x.data) + from, codes, scale, start);
                else
                    encode_group(static_cast<const float*>(x.data) + from, codes, scale, start);
            }
    });
    return {room.codes.data(), room.scales.data(), room.starts.data(), k, groups, x.rows};
}

}  // namespace pw::gemm
