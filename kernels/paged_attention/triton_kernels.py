"""Paged attention on a GPU: the device side. triton.py launches it, api.py says what it computes.

A context is cut into splits of SPLIT tokens at fixed positions. A split is reduced by an online softmax (Dao et al.
2022, "FlashAttention") to (largest score, sum of weights, weighted values); splits are folded in ascending order:

    tokens      0 ............ SPLIT ............ 2 SPLIT ...... context
    decode      one program per split ── partials ──▶ `combine` folds them      (Flash-Decoding, Dao et al. 2023)
    prefill     one program walks the splits and folds as it goes

Both paths do the same operations in the same order, and neither the batch, nor the chunk, nor the grid has a say in
it. The rows of a tile are the query heads of one KV head (GQA packing), for one token in decode, for several in
prefill, so that a block is read once for all of them.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp2_of_difference(x, maximum):
    """2 ** (x - maximum), 0 where both are -inf: no token was seen so far."""
    return tl.exp2(x - tl.where(maximum == float("-inf"), 0.0, maximum))


@triton.jit
def fold(m, total, acc, m_next, total_next, acc_next):
    """Add a split to what was before it. m, total: [BLOCK_M], acc: [BLOCK_M, DIM]."""
    m_new = tl.maximum(m, m_next)
    old, new = exp2_of_difference(m, m_new), exp2_of_difference(m_next, m_new)
    return m_new, total * old + total_next * new, acc * old[:, None] + acc_next * new[:, None]


@triton.jit
def shaped_scores(dots, scale, SOFT_CAP: tl.constexpr):
    """Scores in units of log 2 from products of queries and keys."""
    scores = dots * scale
    if SOFT_CAP > 0:
        # tanh, by an exponential that does not overflow
        small = tl.exp(tl.abs(scores) * (-2.0 / SOFT_CAP))
        scores = tl.where(scores < 0, -SOFT_CAP, SOFT_CAP) * (1.0 - small) / (1.0 + small)
    return scores * LOG2_E


@triton.jit
def attend(
    q,  # [BLOCK_M, DIM]
    positions,  # [BLOCK_M] of each query in its sequence; -1 for rows that are no query
    table,  # [max_blocks] of the row
    k_cache,  # of the KV head: [num_blocks, BLOCK_SIZE, HEAD_DIM], blocks stride_block apart
    v_cache,
    k_scales,  # of the KV head: [num_blocks, BLOCK_SIZE], blocks stride_scales apart
    v_scales,
    start,  # first token, a multiple of BLOCK_N
    end,  # behind the last one
    scale,
    stride_block,
    stride_scales,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Online softmax over a range of tokens: largest score [BLOCK_M], sum [BLOCK_M], weighted values [BLOCK_M, DIM]."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    dims = tl.arange(0, DIM)
    for first in range(start, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        reached = tokens < end  # what lies behind may be NaN
        block = tl.load(table + tokens // BLOCK_SIZE, mask=reached, other=0).to(tl.int64)
        at = block * stride_block + (tokens % BLOCK_SIZE) * HEAD_DIM
        mask = reached[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_cache + at[:, None] + dims[None, :], mask=mask, other=0.0).to(q.dtype)
        dots = tl.dot(q, tl.trans(k), input_precision="ieee")
        if QUANTIZED:
            scale_at = block * stride_scales + tokens % BLOCK_SIZE
            dots *= tl.load(k_scales + scale_at, mask=reached, other=0.0).to(tl.float32)[None, :]
        seen = tokens[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen &= tokens[None, :] > positions[:, None] - WINDOW
        scores = tl.where(seen, shaped_scores(dots, scale, SOFT_CAP), float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        old = exp2_of_difference(m, m_new)
        weights = exp2_of_difference(scores, m_new[:, None])
        total = total * old + tl.sum(weights, 1)
        acc *= old[:, None]
        if QUANTIZED:
            weights *= tl.load(v_scales + scale_at, mask=reached, other=0.0).to(tl.float32)[None, :]
        v = tl.load(v_cache + at[:, None] + dims[None, :], mask=mask, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
        m = m_new
    return m, total, acc


@triton.jit
def decode_kernel(
    partial_values,  # [num_singles, num_heads, max_splits, HEAD_DIM] float32
    partial_stats,  # [num_singles, num_heads, max_splits, 2] float32: largest score, sum
    query,  # [num_tokens, num_heads, HEAD_DIM], tokens stride_query apart
    k_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM], blocks stride_block apart, heads RUN
    v_cache,
    k_scales,  # [num_blocks, num_kv_heads, BLOCK_SIZE], blocks stride_scales apart, heads SCALE_RUN, or None
    v_scales,
    singles,  # [num_singles] rows with one query
    query_starts,  # [num_rows]
    context_lens,  # [num_rows]
    block_tables,  # [num_rows, …], rows stride_table apart
    scale,
    num_heads,
    max_splits,
    stride_query,
    stride_block,
    stride_scales,
    stride_table,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    SCALE_RUN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Splits of one row and up to BLOCK_M heads of one KV head. Grid: rows, KV heads × head tiles, splits at a time."""
    entry = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    row = tl.load(singles + entry).to(tl.int64)
    context = tl.load(context_lens + row)
    lanes = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + lanes
    dims = tl.arange(0, DIM)
    mask = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    at = tl.load(query_starts + row).to(tl.int64) * stride_query + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + at, mask=mask, other=0.0).to(COMPUTE)
    positions = tl.where(lanes < GROUP, context - 1, -1)
    first = tl.maximum(context - WINDOW, 0) // SPLIT if WINDOW > 0 else 0
    for split in range(first + tl.program_id(2), tl.cdiv(context, SPLIT), tl.num_programs(2)):
        m, total, acc = attend(
            q,
            positions,
            block_tables + row * stride_table,
            k_cache + kv_head * RUN,
            v_cache + kv_head * RUN,
            k_scales + kv_head * SCALE_RUN if QUANTIZED else k_scales,
            v_scales + kv_head * SCALE_RUN if QUANTIZED else v_scales,
            split * SPLIT,
            tl.minimum((split + 1) * SPLIT, context),
            scale,
            stride_block,
            stride_scales,
            BLOCK_M,
            BLOCK_N,
            BLOCK_SIZE,
            HEAD_DIM,
            DIM,
            WINDOW,
            SOFT_CAP,
            QUANTIZED,
        )
        slots = (entry * num_heads + heads) * max_splits + split
        tl.store(partial_stats + slots * 2, m, mask=lanes < GROUP)
        tl.store(partial_stats + slots * 2 + 1, total, mask=lanes < GROUP)
        tl.store(partial_values + slots[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask)


@triton.jit
def combine_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    partial_values,  # as in decode_kernel
    partial_stats,
    singles,
    query_starts,
    context_lens,
    num_heads,
    max_splits,
    SPLIT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Folds the splits of one row and head. Grid: rows, heads. A row without context gives zeros."""
    entry = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(singles + entry).to(tl.int64)
    context = tl.load(context_lens + row)
    one, dims = tl.arange(0, 1), tl.arange(0, DIM)
    inside = (dims < HEAD_DIM)[None, :]
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DIM], tl.float32)
    first = tl.maximum(context - WINDOW, 0) // SPLIT if WINDOW > 0 else 0
    for split in range(first, tl.cdiv(context, SPLIT)):
        slot = (entry * num_heads + head) * max_splits + split + one
        m_next = tl.load(partial_stats + slot * 2)
        total_next = tl.load(partial_stats + slot * 2 + 1)
        acc_next = tl.load(partial_values + slot[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        m, total, acc = fold(m, total, acc, m_next, total_next, acc_next)
    values = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = tl.load(query_starts + row).to(tl.int64) * num_heads + head + one
    tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def prefill_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    query,  # [num_tokens, num_heads, HEAD_DIM], tokens stride_query apart
    k_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM], blocks stride_block apart, heads RUN
    v_cache,
    k_scales,  # [num_blocks, num_kv_heads, BLOCK_SIZE], blocks stride_scales apart, heads SCALE_RUN, or None
    v_scales,
    chunks,  # [num_chunks] rows with several queries
    query_starts,  # [num_rows]
    query_lens,  # [num_rows]
    context_lens,  # [num_rows]
    block_tables,  # [num_rows, …], rows stride_table apart
    scale,
    num_heads,
    stride_query,
    stride_block,
    stride_scales,
    stride_table,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    SCALE_RUN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """BLOCK_M // GROUP queries of one row, for the heads of one KV head. Grid: query tiles, KV heads, rows."""
    queries: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    row = tl.load(chunks + tl.program_id(2)).to(tl.int64)
    query_len = tl.load(query_lens + row)
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * queries  # the longest tiles start first
    if first_query < query_len:
        before = tl.load(context_lens + row) - query_len
        lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
        index = first_query + lanes // GROUP
        real = (lanes < queries * GROUP) & (index < query_len)
        heads = kv_head * GROUP + lanes % GROUP
        mask = real[:, None] & (dims < HEAD_DIM)[None, :]
        token = tl.load(query_starts + row).to(tl.int64) + index
        at = token * stride_query + heads * HEAD_DIM
        q = tl.load(query + at[:, None] + dims[None, :], mask=mask, other=0.0).to(COMPUTE)
        positions = tl.where(real, before + index, -1)
        end = before + tl.minimum(first_query + queries, query_len)
        start = tl.maximum(before + first_query - WINDOW + 1, 0) // BLOCK_N * BLOCK_N if WINDOW > 0 else 0
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        for split in range(start // SPLIT, tl.cdiv(end, SPLIT)):
            m_next, total_next, acc_next = attend(
                q,
                positions,
                block_tables + row * stride_table,
                k_cache + kv_head * RUN,
                v_cache + kv_head * RUN,
                k_scales + kv_head * SCALE_RUN if QUANTIZED else k_scales,
                v_scales + kv_head * SCALE_RUN if QUANTIZED else v_scales,
                tl.maximum(split * SPLIT, start),
                tl.minimum((split + 1) * SPLIT, end),
                scale,
                stride_block,
                stride_scales,
                BLOCK_M,
                BLOCK_N,
                BLOCK_SIZE,
                HEAD_DIM,
                DIM,
                WINDOW,
                SOFT_CAP,
                QUANTIZED,
            )
            m, total, acc = fold(m, total, acc, m_next, total_next, acc_next)
        values = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (token * num_heads + heads) * HEAD_DIM
        tl.store(out + place[:, None] + dims[None, :], values.to(out.dtype.element_ty), mask=mask)
