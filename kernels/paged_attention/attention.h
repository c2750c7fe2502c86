// Attention over the paged KV cache: decode rows and prefill chunks in one call. native.py mirrors these structs.
//
// Contract of the numbers: a context is cut into splits at fixed tokens (multiples of `split_tokens`), each split gives
// a partial result, and partial results are merged in order. So what a query token computes depends on its context and
// on nothing else: not on its batch, its chunk, the number of threads, or whether it came as decode or as prefill.
#pragma once

#include <cstdint>

namespace pw {

enum class KvType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// One layer of the cache in the packed layout (kv_words.h). Block b starts at `b * block_stride` bytes, in K and in V.
struct KvLayer {
    char* keys;
    char* values;
    int64_t block_stride, num_kv_heads, block_size, head_dim;
    KvType type;

    // Of numbers or codes in a run; scales of codes follow them.
    int64_t number_bytes() const {
        return block_size * head_dim * (type == KvType::FLOAT32 ? 4 : type == KvType::BFLOAT16 ? 2 : 1);
    }
    int64_t run_bytes() const { return number_bytes() + (type == KvType::INT8 ? block_size * 2 : 0); }
    char* run(char* base, int64_t block, int head) const { return base + block * block_stride + head * run_bytes(); }
};

// Rows of a step in the order of the flat batch; the last query of a row sees its whole context.
struct Rows {
    const int32_t* query_lens;    // [num_rows], >= 1
    const int32_t* context_lens;  // [num_rows]
    const int32_t* block_tables;  // [num_rows][table_stride]
    int64_t table_stride, num_rows;
};

// [num_tokens][num_heads][head_dim], tokens `stride` elements apart.
struct TokenHeads {
    void* data;
    int64_t stride;
    int64_t is_bf16;  // or float32

    template <class T>
    T* at(int64_t token) const {
        return static_cast<T*>(data) + token * stride;
    }
};

struct AttentionOptions {
    int64_t num_heads;
    int64_t window;  // tokens that a query sees, itself included; 0: all
    int64_t pairs;   // whether bfloat16 queries and weights are multiplied in pairs: HAS_PAIR_PRODUCTS, except in tests
    float scale;
    float soft_cap;  // 0: none
};

// Tokens of a split: the whole blocks that 256 tokens hold, at least one.
inline int split_tokens(int64_t block_size) {
    return int(block_size < 256 ? 256 / block_size * block_size : block_size);
}

// `out` has the type of `queries`; float32 queries may meet a bfloat16 cache, not the reverse; both meet an int8 one.
void paged_attention(const TokenHeads& queries, const TokenHeads& out, const KvLayer& layer, const Rows& rows,
                     const AttentionOptions& options);

}  // namespace pw
