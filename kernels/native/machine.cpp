// What the machine can do at most, for benchmarks: products from registers, reads from memory.
#include <algorithm>

#include "kernels/native/pairs.h"
#include "kernels/native/parallel.h"

namespace {

// Independent accumulators, which hide the latency of a product; in two dimensions, since GCC unrolls short loops only.
constexpr int CHAINS[] = {pw::LANES == 8 ? 3 : 6, 4};

// rounds * (all chains) products of whole vectors, 8 chunks per thread.
template <class Acc, class Product>
void multiply(int64_t rounds, Acc first, float* sink, const Product& product) {
    pw::parallel(pw::num_threads() * 8, [&](int chunk) {
        Acc acc[CHAINS[0]][CHAINS[1]];
        for (auto& some : acc)
            for (Acc& a : some) a = first;
        for (int64_t i = 0; i < rounds; ++i)
            for (auto& some : acc)
                for (Acc& a : some) a = product(a);
        for (const auto& some : acc)
            for (const Acc& a : some) std::memcpy(sink + chunk * pw::LANES, &a, sizeof(a));
    });
}

}  // namespace

// Runs `rounds` on each of 8 chunks per thread; answers multiply-adds of numbers. kind: 0 float32, 1 bfloat16 pairs,
// 2 int8, or 0 products where no instruction does it. sink: [8 * threads][LANES].
PW_EXPORT int64_t pw_multiply_in_registers(int64_t kind, int64_t rounds, float* sink) {
    const int64_t vectors = rounds * CHAINS[0] * CHAINS[1] * 8 * pw::num_threads();
    const pw::F32 small = pw::set1(1e-9f);
    if (kind == 0) {
        multiply(rounds, pw::zero(), sink, [=](pw::F32 a) { return pw::fma(small, small, a); });
        return vectors * pw::LANES;
    }
#ifdef __AVX512BF16__
    if (kind == 1) {
        multiply(rounds, pw::zero(), sink, [=](pw::F32 a) { return pw::dot_pairs(small, small, a); });
        return vectors * pw::LANES * 2;
    }
#endif
#ifdef __AVX512VNNI__
    if (kind == 2) {
        const __m512i one = _mm512_set1_epi32(1);
        multiply(rounds, one, sink, [=](__m512i a) {
            asm("vpdpbusd %1, %1, %0" : "+v"(a) : "v"(one));
            return a;
        });
        return vectors * pw::LANES * 4;
    }
#endif
    return 0;
}

// Reads memory once, in chunks of 256 KB; answers a number that depends on it. bytes: a multiple of 64.
PW_EXPORT float pw_read_memory(const float* data, int64_t bytes, float* sink) {
    constexpr int64_t CHUNK = 1 << 16;  // floats
    const int64_t count = bytes / 4;
    pw::parallel(int((count + CHUNK - 1) / CHUNK), [=](int chunk) {
        constexpr int AT_ONCE = 8;
        pw::F32 acc[AT_ONCE];
        for (auto& a : acc) a = pw::zero();
        const int64_t end = std::min(count, (chunk + 1) * CHUNK) - AT_ONCE * pw::LANES;
        for (int64_t i = chunk * CHUNK; i <= end; i += AT_ONCE * pw::LANES)
            for (int v = 0; v < AT_ONCE; ++v) {
                acc[v] = acc[v] + pw::load(data + i + v * pw::LANES);
                __builtin_prefetch(data + i + 1024 + v * pw::LANES);
            }
        for (int v = 1; v < AT_ONCE; ++v) acc[0] = acc[0] + acc[v];
        if (pw::sum(acc[0]) == 1.25f) sink[0] = 1;
    });
    return sink[0];
}
