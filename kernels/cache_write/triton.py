"""Cache write on a GPU, fused with the rotary embedding and, for a cache of codes, with the quantization.

One launch reads a step's queries, keys and values once: queries come back rotated, keys and values go to their slots.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.cache_write.api import HeadNorms
from kernels.kv_codec.reference import LARGEST
from kernels.kv_layout.api import split_plain
from kernels.launch import Launch, next_power_of_2, whole_heads

_TILE = 1024
"""Elements per program, in whole heads."""


@triton.jit
def _turned(
    x,  # [num_heads, HEAD_DIM] of one token
    cos,  # [ROTARY] of the token
    sin,  # [ROTARY], negated in its first half
    norm,  # [HEAD_DIM] or None: weight of an RMSNorm of each head
    eps,
    heads,
    inside,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    DIM: tl.constexpr,
):
    """Heads, normalised if there is a norm, with pairs (i, i + ROTARY / 2) rotated: [heads, DIM] float32."""
    dims = tl.arange(0, DIM)
    at = heads[:, None] * HEAD_DIM
    values = tl.load(x + at + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + eps)
        values *= factor[:, None] * tl.load(norm + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    if ROTARY > 0:
        turning = dims < ROTARY
        partner = tl.where(dims < ROTARY // 2, dims + ROTARY // 2, dims - ROTARY // 2)
        others = tl.load(x + at + partner[None, :], mask=inside & turning[None, :], other=0.0).to(tl.float32)
        if norm is not None:
            weight = tl.load(norm + partner, mask=turning, other=0.0).to(tl.float32)
            others *= factor[:, None] * weight[None, :]
        c = tl.load(cos + dims, mask=turning, other=1.0).to(tl.float32)
        s = tl.load(sin + dims, mask=turning, other=0.0).to(tl.float32)
        values = values * c[None, :] + others * s[None, :]
    return values


@triton.jit
def _rounded_to_integer(x):
    """To the nearest, ties to even, for |x| < 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _rounded_to_e4m3(x):
    """To the nearest number of 3 mantissa bits and least exponent -6, ties to even: then any cast is exact."""
    small = _rounded_to_integer(x * 512.0) / 512.0
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def _store(
    cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM], blocks stride_block apart, heads RUN
    scales,  # [num_blocks, num_kv_heads, BLOCK_SIZE], blocks stride_scales apart, heads SCALE_RUN, or None
    values,  # [heads, DIM] float32
    slot,
    heads,
    inside,
    stride_block,
    stride_scales,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    SCALE_RUN: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One token to its slot; LARGEST is the largest code, 0 for a cache of plain numbers."""
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = block * stride_block + heads * RUN + offset * HEAD_DIM
    pointers = cache + at[:, None] + tl.arange(0, DIM)[None, :]
    if LARGEST == 0:
        tl.store(pointers, values.to(cache.dtype.element_ty), mask=inside)
    else:
        # As in kernels/kv_codec: the codes are computed with the scale as it is stored.
        scale = tl.minimum(tl.max(tl.abs(values), 1) / LARGEST, 65504.0)
        has_nan = tl.sum((values != values).to(tl.int32), 1) > 0
        stored = tl.where(has_nan, float("nan"), scale).to(scales.dtype.element_ty)
        divisor = tl.maximum(stored.to(tl.float32), 5.9604645e-08)[:, None] + tl.zeros_like(values)
        codes = tl.where(has_nan[:, None], 0.0, tl.div_rn(values, divisor))
        codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST)
        codes = _rounded_to_integer(codes) if LARGEST == 127 else _rounded_to_e4m3(codes)
        tl.store(pointers, codes.to(cache.dtype.element_ty), mask=inside)
        tl.store(
            scales + block * stride_scales + heads * SCALE_RUN + offset,
            stored,
            mask=tl.sum(inside.to(tl.int32), 1) > 0,
        )


@triton.jit
def cache_write_kernel(
    query_out,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    k_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM], heads RUN apart
    v_cache,
    k_scales,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE], heads SCALE_RUN apart, or None
    v_scales,
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM], tokens stride_query apart
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM], tokens stride_key apart
    value,
    slot_mapping,  # [num_tokens] int64; a negative slot is not written
    cos,  # [num_tokens, ROTARY] or None
    sin,
    query_norm,  # [HEAD_DIM] or None
    key_norm,
    eps,
    stride_query,
    stride_key,
    stride_value,
    stride_block,
    stride_scales,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RUN: tl.constexpr,
    SCALE_RUN: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """BLOCK_H heads of one token. Grid: tokens, head tiles of queries, then of keys, then of values."""
    query_tiles: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    kv_tiles: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lanes, dims = tl.arange(0, BLOCK_H), tl.arange(0, DIM)
    if ROTARY > 0:
        cos += token * ROTARY
        sin += token * ROTARY
    if tile < query_tiles:
        heads = tile * BLOCK_H + lanes
        inside = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        turned = _turned(query + token * stride_query, cos, sin, query_norm, eps, heads, inside, HEAD_DIM, ROTARY, DIM)
        at = (token * NUM_HEADS + heads) * HEAD_DIM
        tl.store(query_out + at[:, None] + dims[None, :], turned.to(query_out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        is_key = tile < query_tiles + kv_tiles
        heads = (tile - query_tiles) % kv_tiles * BLOCK_H + lanes
        count = tl.where(slot >= 0, NUM_KV_HEADS, 0)
        inside = (heads < count)[:, None] & (dims < HEAD_DIM)[None, :]
        if is_key:
            turned = _turned(key + token * stride_key, cos, sin, key_norm, eps, heads, inside, HEAD_DIM, ROTARY, DIM)
            _store(
                k_cache,
                k_scales,
                turned,
                slot,
                heads,
                inside,
                stride_block,
                stride_scales,
                HEAD_DIM,
                DIM,
                BLOCK_SIZE,
                RUN,
                SCALE_RUN,
                LARGEST,
            )
        else:
            plain = _turned(value + token * stride_value, None, None, None, eps, heads, inside, HEAD_DIM, 0, DIM)
            _store(
                v_cache,
                v_scales,
                plain,
                slot,
                heads,
                inside,
                stride_block,
                stride_scales,
                HEAD_DIM,
                DIM,
                BLOCK_SIZE,
                RUN,
                SCALE_RUN,
                LARGEST,
            )


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of the first dimensions of a head, as many as the tables are wide (kernels/rope/api.py)."""

    cos: torch.Tensor
    """[num_tokens, rotary_dim], contiguous."""
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """Where keys and values go."""

    k_cache: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim] of one layer, strides of blocks and heads free: numbers, or
    codes (int8 or float8_e4m3fn)."""
    v_cache: torch.Tensor
    k_scales: torch.Tensor | None
    """[num_blocks, num_kv_heads, block_size] of codes."""
    v_scales: torch.Tensor | None
    mapping: torch.Tensor
    """[num_tokens] int64; a negative slot is not written."""


def slots(k_cache: torch.Tensor, v_cache: torch.Tensor, mapping: torch.Tensor) -> Slots:
    """Of one layer's plain cache (kernels/kv_layout)."""
    (keys, k_scales), (values, v_scales) = split_plain(k_cache), split_plain(v_cache)
    return Slots(keys, values, k_scales, v_scales, mapping)


def cache_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: Slots,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Store keys and values, rotated if asked for; the queries, rotated alike, in new memory."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch(out, whole_heads(query), whole_heads(key), whole_heads(value), slots, rotation, norms).run()
    return out


def launch(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: Slots,
    rotation: Rotation | None,
    norms: HeadNorms | None,
) -> Launch:
    """The kernel that fills `out` and the slots.

    Args:
        query, out: [num_tokens, num_heads, head_dim]; no heads where only keys and values are of interest.
        key, value: [num_tokens, num_kv_heads, head_dim]. Heads of all three are contiguous, their tokens any stride.
    """
    num_heads, (num_kv_heads, block_size, head_dim) = query.shape[1], slots.k_cache.shape[1:]
    dim = next_power_of_2(head_dim)
    block_h = max(1, min(next_power_of_2(max(num_heads, num_kv_heads)), _TILE // dim))
    tiles = triton.cdiv(num_heads, block_h) + 2 * triton.cdiv(num_kv_heads, block_h)
    arguments: dict[str, object] = {
        "query_out": out,
        "k_cache": slots.k_cache,
        "v_cache": slots.v_cache,
        "k_scales": slots.k_scales,
        "v_scales": slots.v_scales,
        "query": query,
        "key": key,
        "value": value,
        "slot_mapping": slots.mapping,
        "cos": None if rotation is None else rotation.cos,
        "sin": None if rotation is None else rotation.sin,
        "query_norm": None if norms is None else norms.query,
        "key_norm": None if norms is None else norms.key,
        "eps": 0.0 if norms is None else norms.eps,
        "stride_query": query.stride(0),
        "stride_key": key.stride(0),
        "stride_value": value.stride(0),
        "stride_block": slots.k_cache.stride(0),
        "stride_scales": 0 if slots.k_scales is None else slots.k_scales.stride(0),
    }
    constants: dict[str, object] = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROTARY": 0 if rotation is None else rotation.cos.shape[1],
        "BLOCK_SIZE": block_size,
        "RUN": slots.k_cache.stride(1),
        "SCALE_RUN": 0 if slots.k_scales is None else slots.k_scales.stride(1),
        "DIM": dim,
        "BLOCK_H": block_h,
        "LARGEST": 0 if slots.k_scales is None else LARGEST[slots.k_cache.dtype],
    }
    return Launch(cache_write_kernel, (len(key), tiles), arguments, constants)
