#include <algorithm>
#include <chrono>

#include "kernels/cache_write/cache_write.h"
#include "kernels/decoder_step/decoder.h"
#include "kernels/native/pairs.h"
#include "kernels/native/parallel.h"
#include "kernels/paged_attention/attention.h"
#include "kernels/rms_norm/rms_norm.h"

namespace pw {
namespace {

constexpr int64_t ROWS_PER_CHUNK = 8;  // of what is done row by row

// Adds the seconds of its life to `to`.
class Timer {
public:
    explicit Timer(double& to) : to_(to), started_(std::chrono::steady_clock::now()) {}
    ~Timer() { to_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count(); }

private:
    double& to_;
    const std::chrono::steady_clock::time_point started_;
};

// body(row) for each row, some rows at a time.
template <class Body>
void for_rows(int64_t rows, const Body& body) {
    parallel(int((rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK), [&](int chunk) {
        const int64_t end = std::min(rows, (chunk + 1) * ROWS_PER_CHUNK);
        for (int64_t row = chunk * ROWS_PER_CHUNK; row < end; ++row) body(row);
    });
}

// Cuts a step's buffers from the workspace. Without one it only counts.
struct Cutter {
    char* next;
    int64_t used = 0;

    template <class T>
    T* take(int64_t count) {
        T* const here = reinterpret_cast<T*>(next + used);
        used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return here;
    }
};

// `A` is the type of activations between products.
template <class A>
struct Buffers {
    float* hidden;     // the residual stream
    float* projected;  // of what is normalised before it is added
    A* normed;
    A* qkv;
    A* attended;
    A* gated;

    Buffers(const Decoder& d, int64_t tokens, Cutter& cutter)
        : hidden(cutter.take<float>(tokens * d.hidden_size)),
          projected(cutter.take<float>(tokens * d.hidden_size)),
          normed(cutter.take<A>(tokens * d.hidden_size)),
          qkv(cutter.take<A>(tokens * d.qkv_size())),
          attended(cutter.take<A>(tokens * d.attended_size())),
          gated(cutter.take<A>(tokens * d.intermediate_size)) {}
};

template <class A>
class Forward {
public:
    Forward(const Decoder& d, const Cache& cache, const Step& step, Cutter cutter)
        : d_(d), cache_(cache), step_(step), at_(d, step.num_tokens, cutter), rows_(step.num_tokens) {}

    void run() {
        embed();
        for (int64_t i = 0; i < d_.num_layers; ++i) {
            const DecoderLayer& layer = d_.layers[i];
            norm(layer.input_norm);
            project(layer.qkv, at_.normed, d_.hidden_size, at_.qkv, d_.qkv_size());
            attend(layer, i);
            // From the last layer's attention on, only sampled tokens matter.
            if (i == d_.num_layers - 1) keep_samples();
            if (rows_ == 0) return;
            add(layer.out, at_.attended, d_.attended_size(), layer.post_attention_norm);
            norm(layer.mlp_norm);
            project(layer.gated, at_.normed, d_.hidden_size, at_.gated, d_.intermediate_size);
            add(layer.down, at_.gated, d_.intermediate_size, layer.post_mlp_norm);
        }
        norm(d_.final_norm);
        look_at_logits();
    }

private:
    static constexpr bool IS_BF16 = sizeof(A) == 2;

    void embed() {
        const F32 scale = set1(d_.embedding_scale);
        for_rows(rows_, [&](int64_t row) {
            float* to = at_.hidden + row * d_.hidden_size;
            const int64_t from = step_.token_ids[row] * d_.hidden_size;
            for (int64_t i = 0; i < d_.hidden_size; i += LANES) {
                const int n = int(d_.hidden_size - i);
                const F32 x = d_.embedding_is_bf16
                                  ? load_or_part(static_cast<const bf16*>(d_.embedding) + from + i, n)
                                  : load_or_part(static_cast<const float*>(d_.embedding) + from + i, n);
                store_or_part(to + i, x * scale, n);
            }
        });
    }

    void norm(const float* weight) {
        for_rows(rows_, [&](int64_t row) {
            rms_norm_row(at_.hidden + row * d_.hidden_size, weight, d_.norm_eps, int(d_.hidden_size),
                         at_.normed + row * d_.hidden_size);
        });
    }

    template <class Out>
    void project(const Projection& by, const A* x, int64_t inputs, Out* out, int64_t outputs,
                 const float* residual = nullptr) {
        linear(by.weight, {x, rows_, inputs, IS_BF16},
               {out, outputs, sizeof(Out) == 2, by.bias, residual, d_.activation, 0});
    }

    // hidden += what `by` makes of x, normalised if the layer says so.
    void add(const Projection& by, const A* x, int64_t inputs, const float* post_norm) {
        if (post_norm == nullptr) return project(by, x, inputs, at_.hidden, d_.hidden_size, at_.hidden);
        project(by, x, inputs, at_.projected, d_.hidden_size);
        const int size = int(d_.hidden_size);
        for_rows(rows_, [&](int64_t row) {
            float* made = at_.projected + row * size;
            float* to = at_.hidden + row * size;
            rms_norm_row(made, post_norm, d_.norm_eps, size, made);
            for (int i = 0; i < size; i += LANES)
                store_or_part(to + i, load_or_part(to + i, size - i) + load_or_part(made + i, size - i), size - i);
        });
    }

    void attend(const DecoderLayer& layer, int64_t index) {
        char* const keys = cache_.data + 2 * index * cache_.part_bytes;
        const KvLayer kv{keys, keys + cache_.part_bytes, cache_.block_bytes, d_.num_kv_heads,
                         cache_.block_size, d_.head_dim, cache_.type};
        const auto heads = [&](int64_t first) { return TokenHeads{at_.qkv + first * d_.head_dim, d_.qkv_size(), IS_BF16}; };
        const TokenHeads queries = heads(0), attended{at_.attended, d_.attended_size(), IS_BF16};
        const Projections projections{queries, heads(d_.num_heads), heads(d_.num_heads + d_.num_kv_heads), d_.num_heads};
        rope_cache_write(projections, queries, kv, step_.slots, rows_,
                         {layer.rotation, step_.positions, layer.rotary_dims},
                         {layer.query_norm, layer.key_norm, d_.norm_eps});
        const Timer timer(*step_.attention_s);
        paged_attention(queries, attended, kv, step_.rows,
                        {d_.num_heads, layer.window, HAS_PAIR_PRODUCTS, d_.attention_scale, d_.attention_soft_cap});
    }

    // Moves what belongs to sampled tokens to the front; their places ascend.
    void keep_samples() {
        if (step_.sample_at == nullptr && step_.num_samples == rows_) return;
        rows_ = step_.num_samples;
        for (int64_t row = 0; row < rows_; ++row) {
            const int64_t from = step_.sample_at[row];
            std::copy_n(at_.hidden + from * d_.hidden_size, d_.hidden_size, at_.hidden + row * d_.hidden_size);
            std::copy_n(at_.attended + from * d_.attended_size(), d_.attended_size(),
                        at_.attended + row * d_.attended_size());
        }
    }

    void look_at_logits() {
        const LinearInput x{at_.normed, rows_, d_.hidden_size, IS_BF16};
        if (step_.logits != nullptr)
            linear(d_.head, x, {step_.logits, d_.head.out_features, 0, nullptr, nullptr, Gate::SILU, d_.logit_soft_cap});
        else
            linear_argmax(d_.head, x, d_.logit_soft_cap, step_.largest);
    }

    const Decoder& d_;
    const Cache& cache_;
    const Step& step_;
    const Buffers<A> at_;
    int64_t rows_;
};

}  // namespace

int64_t workspace_bytes(const Decoder& decoder, int64_t num_tokens) {
    Cutter cutter{nullptr};
    if (decoder.is_bf16)
        Buffers<bf16>(decoder, num_tokens, cutter);
    else
        Buffers<float>(decoder, num_tokens, cutter);
    return cutter.used;
}

void run_step(const Decoder& decoder, const Cache& cache, const Step& step) {
    const Cutter cutter{step.workspace};
    if (decoder.is_bf16)
        Forward<bf16>(decoder, cache, step, cutter).run();
    else
        Forward<float>(decoder, cache, step, cutter).run();
}

}  // namespace pw

PW_EXPORT int64_t pw_workspace_bytes(const pw::Decoder* decoder, int64_t num_tokens) {
    return pw::workspace_bytes(*decoder, num_tokens);
}

PW_EXPORT void pw_decoder_step(const pw::Decoder* decoder, const pw::Cache* cache, const pw::Step* step) {
    pw::run_step(*decoder, *cache, *step);
}
