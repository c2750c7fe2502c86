#include "kernels/cache_write/cache_write.h"

#include <algorithm>

#include "kernels/cache_write/codes.h"
#include "kernels/native/parallel.h"
#include "kernels/rms_norm/rms_norm.h"

namespace pw {
namespace {

constexpr int TOKENS = 8;  // of a chunk

// x[0 … dims) of a head, in place.
void rotate(float* x, const float* cosines, int dims) {
    const int half = dims / 2;
    const float* sines = cosines + half;
    for (int i = 0; i < half; i += LANES) {
        const int n = half - i;
        const F32 a = load_or_part(x + i, n), b = load_or_part(x + half + i, n);
        const F32 c = load_or_part(cosines + i, n), s = load_or_part(sines + i, n);
        store_or_part(x + i, fma(a, c, zero() - b * s), n);
        store_or_part(x + half + i, fma(b, c, a * s), n);
    }
}

// Where a token lives within a (block, kv head) run: K [head_dim / GROUP][block_size][GROUP],
// V [block_size / GROUP][head_dim][GROUP] (kernels/paged_attention/kv_words.h).
// Of int8: K [head_dim][block_size], V [block_size][head_dim], then the scales.
template <class Stored>
void write_key(const float* key, Stored* run, int offset, int block_size, int head_dim) {
    constexpr int GROUP = 4 / sizeof(Stored);
    for (int d = 0; d < head_dim; ++d) narrow(key[d], run + (d / GROUP * block_size + offset) * GROUP + d % GROUP);
}

void write_key(const float* key, int8_t* run, int offset, int block_size, int head_dim) {
    auto* const scales = reinterpret_cast<bf16*>(run + block_size * head_dim);
    encode_vector(key, head_dim, run + offset, block_size, scales + offset);
}

template <class Stored>
void write_value(const float* value, Stored* run, int offset, int, int head_dim) {
    constexpr int GROUP = 4 / sizeof(Stored);
    Stored* line = run + offset / GROUP * head_dim * GROUP + offset % GROUP;
    for (int d = 0; d < head_dim; ++d) narrow(value[d], line + d * GROUP);
}

void write_value(const float* value, int8_t* run, int offset, int block_size, int head_dim) {
    auto* const scales = reinterpret_cast<bf16*>(run + block_size * head_dim);
    encode_vector(value, head_dim, run + offset * head_dim, 1, scales + offset);
}

template <class T, class Stored>
class Writer {
public:
    Writer(const Projections& projections, const TokenHeads& out, const KvLayer& layer, const int64_t* slots,
           const Rotation& rotation, const HeadNorms& norms)
        : from_(projections), out_(out), layer_(layer), slots_(slots), rotation_(rotation), norms_(norms),
          dim_(int(layer.head_dim)) {}

    void run(int64_t token) const {
        float* head = static_cast<float*>(scratch(size_t(dim_ + LANES) * sizeof(float)));
        for (int h = 0; h < from_.num_heads; ++h) {
            turn(from_.queries.at<T>(token) + h * dim_, norms_.query, token, head);
            T* to = out_.at<T>(token) + h * dim_;
            for (int d = 0; d < dim_; d += LANES) store_or_part(to + d, load(head + d), dim_ - d);
        }
        const int64_t block = slots_[token] / layer_.block_size;
        const int offset = int(slots_[token] % layer_.block_size);
        for (int h = 0; h < layer_.num_kv_heads; ++h) {
            turn(from_.keys.at<T>(token) + h * dim_, norms_.key, token, head);
            write_key(head, stored(layer_.keys, block, h), offset, int(layer_.block_size), dim_);
            fetch(from_.values.at<T>(token) + h * dim_, head);
            write_value(head, stored(layer_.values, block, h), offset, int(layer_.block_size), dim_);
        }
    }

private:
    Stored* stored(char* base, int64_t block, int head) const {
        return reinterpret_cast<Stored*>(layer_.run(base, block, head));
    }

    // One head in float32.
    void fetch(const T* from, float* to) const {
        for (int d = 0; d < dim_; d += LANES) store(to + d, load_or_part(from + d, dim_ - d));
    }

    // The same, normalised and rotated.
    void turn(const T* from, const float* norm, int64_t token, float* to) const {
        fetch(from, to);
        if (norm != nullptr) rms_norm_row(to, norm, norms_.eps, dim_, to);
        if (rotation_.dims > 0)
            rotate(to, rotation_.table + rotation_.positions[token] * rotation_.dims, int(rotation_.dims));
    }

    const Projections from_;
    const TokenHeads out_;
    const KvLayer layer_;
    const int64_t* slots_;
    const Rotation rotation_;
    const HeadNorms norms_;
    const int dim_;
};

}  // namespace

void rope_cache_write(const Projections& projections, const TokenHeads& out, const KvLayer& layer, const int64_t* slots,
                      int64_t num_tokens, const Rotation& rotation, const HeadNorms& norms) {
    const auto run = [&](const auto& writer) {
        parallel(int((num_tokens + TOKENS - 1) / TOKENS), [&](int chunk) {
            const int64_t end = std::min<int64_t>(num_tokens, int64_t(chunk + 1) * TOKENS);
            for (int64_t token = int64_t(chunk) * TOKENS; token < end; ++token) writer.run(token);
        });
    };
    const bool is_int8 = layer.type == KvType::INT8;
    if (projections.keys.is_bf16 && is_int8)
        run(Writer<bf16, int8_t>(projections, out, layer, slots, rotation, norms));
    else if (projections.keys.is_bf16)
        run(Writer<bf16, bf16>(projections, out, layer, slots, rotation, norms));
    else if (is_int8)
        run(Writer<float, int8_t>(projections, out, layer, slots, rotation, norms));
    else if (layer.type == KvType::BFLOAT16)
        run(Writer<float, bf16>(projections, out, layer, slots, rotation, norms));
    else
        run(Writer<float, float>(projections, out, layer, slots, rotation, norms));
}

}  // namespace pw

PW_EXPORT void pw_rope_cache_write(const pw::Projections* projections, const pw::TokenHeads* out,
                                   const pw::KvLayer* layer, const int64_t* slots, int64_t num_tokens,
                                   const pw::Rotation* rotation, const pw::HeadNorms* norms) {
    pw::rope_cache_write(*projections, *out, *layer, slots, num_tokens, *rotation, *norms);
}
