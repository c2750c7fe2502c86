// Queries and keys of a step are rotated, keys and values written to the packed cache, in one pass. native.py mirrors these structs.
#pragma once

#include "kernels/paged_attention/attention.h"

namespace pw {

// Rotary embedding, half-split: of the first `dims` dimensions of a head, i turns with i + dims / 2; the rest stays.
struct Rotation {
    const float* table;        // [positions][dims]: cosines of dims / 2 angles, then their sines
    const int64_t* positions;  // [num_tokens]: rows of the table
    int64_t dims;              // even, <= head_dim; 0: nothing turns
};

// RMSNorm of each head before it turns (Qwen3, Gemma 3); null: none.
struct HeadNorms {
    const float* query;  // [head_dim]
    const float* key;    // [head_dim]
    float eps;
};

// Of one token: num_heads query heads, num_kv_heads keys and as many values; one type. They may lie side by side.
struct Projections {
    TokenHeads queries, keys, values;
    int64_t num_heads;  // 0: no queries
};

// Rotated queries go to `out`, which may be the projections themselves; keys and values of token t to slot `slots[t]`,
// no slot twice. float32 is rounded to a bfloat16 cache, both to an int8 one (codes.h); bfloat16 has no wider cache.
void rope_cache_write(const Projections& projections, const TokenHeads& out, const KvLayer& layer, const int64_t* slots,
                      int64_t num_tokens, const Rotation& rotation, const HeadNorms& norms);

}  // namespace pw
