// A decoder of the Llama family and one step of it, as kernels/decoder_step/native.py lays them out.
#pragma once

#include <cstdint>

#include "kernels/linear/linear.h"
#include "kernels/paged_attention/attention.h"

namespace pw {

struct Projection {
    PackedWeight weight;
    const float* bias;  // [out_features] or null
};

// Norm weights are float32, [hidden_size] or [head_dim]; null where the model has none.
struct DecoderLayer {
    const float* input_norm;
    Projection qkv;  // query heads, key heads, value heads
    const float* query_norm;
    const float* key_norm;
    Projection out;
    const float* post_attention_norm;
    const float* mlp_norm;
    Projection gated;
    Projection down;
    const float* post_mlp_norm;
    const float* rotation;  // [positions][rotary_dims]: cosines, then sines
    int64_t rotary_dims;
    int64_t window;  // tokens that a token sees, itself included; 0: all
};

struct Decoder {
    const DecoderLayer* layers;
    int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    const void* embedding;  // [vocabulary][hidden_size]
    int64_t embedding_is_bf16;
    const float* final_norm;
    PackedWeight head;
    Gate activation;
    int64_t is_bf16;  // activations between products; the residual stream is float32
    float embedding_scale, norm_eps, attention_scale;
    float attention_soft_cap, logit_soft_cap;  // 0: none

    int64_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
    int64_t attended_size() const { return num_heads * head_dim; }
};

// The paged cache: block b of layer l has its keys at data + b * block_bytes + 2 * l * part_bytes, then its values.
struct Cache {
    char* data;
    int64_t block_bytes, part_bytes, block_size;
    KvType type;
};

// The flat token batch. Rows and slots as kernels/paged_attention/api.py says.
struct Step {
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slots;
    int64_t num_tokens;
    Rows rows;
    const int64_t* sample_at;  // [num_samples] places in the batch, ascending; or null for all tokens or for none
    int64_t num_samples;
    char* workspace;   // workspace_bytes(), aligned to 64
    float* logits;     // [num_samples][vocabulary], or null
    Largest* largest;  // [num_samples], or null
    double* attention_s;  // seconds of attention are added to it
};

// Bytes of workspace for `num_tokens`.
int64_t workspace_bytes(const Decoder& decoder, int64_t num_tokens);

// Runs the step: keys and values go to the cache, logits or their largest to `step`.
void run_step(const Decoder& decoder, const Cache& cache, const Step& step);

}  // namespace pw
