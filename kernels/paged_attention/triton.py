"""Paged attention on a GPU: the host side of triton_kernels.py."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, next_power_of_2, whole_heads
from kernels.paged_attention.gpu_batch import GpuBatch
from kernels.paged_attention.triton_kernels import combine_kernel, decode_kernel, prefill_kernel

SPLIT = 512
"""Tokens per split, a multiple of every BLOCK_N. Part of the numerics: another value is another order of additions."""
_MIN_DOT = 16
"""Rows of the smallest matrix product."""
_MAX_SPLIT_PROGRAMS = 64
"""Splits of a row that are computed at once; a longer context gives each program several."""
_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Layer:
    """One call's cache and what shapes its scores."""

    k_cache: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim], strides of blocks and heads free, of the query's dtype, or
    codes: int8 or float8_e4m3fn."""
    v_cache: torch.Tensor
    k_scales: torch.Tensor | None
    """[num_blocks, num_kv_heads, block_size] factors of the codes."""
    v_scales: torch.Tensor | None
    scale: float
    window: int | None
    soft_cap: float | None


def paged_attention(query: torch.Tensor, layer: Layer, batch: GpuBatch) -> torch.Tensor:
    """See api.paged_attention."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for launch in launches(out, whole_heads(query), layer, batch):
        launch.run()
    return out


def launches(out: torch.Tensor, query: torch.Tensor, layer: Layer, batch: GpuBatch) -> list[Launch]:
    """Kernels that fill `out` [num_tokens, num_heads, head_dim]; the heads of a query are contiguous."""
    found = []
    if len(batch.singles):
        found += _decode(out, query, layer, batch)
    if len(batch.chunks):
        found.append(_prefill(out, query, layer, batch))
    return found


def _decode(out: torch.Tensor, query: torch.Tensor, layer: Layer, batch: GpuBatch) -> list[Launch]:
    count, num_heads, head_dim = len(batch.singles), query.shape[1], query.shape[2]
    max_splits = triton.cdiv(batch.longest_context, SPLIT)
    values = torch.empty(count, num_heads, max_splits, head_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(count, num_heads, max_splits, 2, dtype=torch.float32, device=query.device)
    group = num_heads // layer.k_cache.shape[1]
    block_m = min(64, max(_MIN_DOT, next_power_of_2(group)))
    grid = (count, layer.k_cache.shape[1] * triton.cdiv(group, block_m), min(max_splits, _MAX_SPLIT_PROGRAMS))
    shared: dict[str, object] = {
        "partial_values": values,
        "partial_stats": stats,
        "singles": batch.singles,
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "num_heads": num_heads,
        "max_splits": max_splits,
    }
    constants = _constants(query, layer, block_m)
    folding = {name: constants[name] for name in ("SPLIT", "HEAD_DIM", "DIM", "WINDOW")}
    num_stages = 1 if _widens_to_float32(query, layer) else 3
    return [
        Launch(decode_kernel, grid, _arguments(query, layer, batch) | shared, constants, num_stages=num_stages),
        Launch(combine_kernel, (count, num_heads), {"out": out} | shared, folding, num_warps=2),
    ]


def _prefill(out: torch.Tensor, query: torch.Tensor, layer: Layer, batch: GpuBatch) -> Launch:
    num_kv_heads = layer.k_cache.shape[1]
    group = query.shape[1] // num_kv_heads
    block_m = max(_rows_of_chunk(query, has_codes=layer.k_scales is not None), next_power_of_2(group))
    grid = (triton.cdiv(batch.longest_chunk, block_m // group), num_kv_heads, len(batch.chunks))
    arguments = _arguments(query, layer, batch) | {
        "out": out,
        "chunks": batch.chunks,
        "query_starts": batch.query_starts,
        "query_lens": batch.query_lens,
        "context_lens": batch.context_lens,
        "num_heads": query.shape[1],
    }
    num_stages = 1 if _widens_to_float32(query, layer) else 2
    return Launch(prefill_kernel, grid, arguments, _constants(query, layer, block_m), 8, num_stages)


def _rows_of_chunk(query: torch.Tensor, *, has_codes: bool) -> int:
    """Most rows of a prefill tile: two accumulators, and what it takes to widen codes or to multiply in float32, for
    which there is no tensor core, must fit the registers."""
    is_wide = query.dtype == torch.float32
    elements = 16384 >> is_wide + has_codes
    return min(32 if is_wide else 128, elements // next_power_of_2(query.shape[2]))


def _widens_to_float32(query: torch.Tensor, layer: Layer) -> bool:
    """Whether codes become operands of four bytes, which no tensor core takes: loads ahead would not fit the registers
    beside them."""
    return query.dtype == torch.float32 and layer.k_scales is not None


def _arguments(query: torch.Tensor, layer: Layer, batch: GpuBatch) -> dict[str, object]:
    return {
        "query": query,
        "k_cache": layer.k_cache,
        "v_cache": layer.v_cache,
        "k_scales": layer.k_scales,
        "v_scales": layer.v_scales,
        "block_tables": batch.block_tables,
        "scale": layer.scale,
        "stride_query": query.stride(0),
        "stride_block": layer.k_cache.stride(0),
        "stride_scales": 0 if layer.k_scales is None else layer.k_scales.stride(0),
        "stride_table": batch.block_tables.stride(0),
    }


def _constants(query: torch.Tensor, layer: Layer, block_m: int) -> dict[str, object]:
    num_kv_heads, block_size, head_dim = layer.k_cache.shape[1:]
    return {
        "GROUP": query.shape[1] // num_kv_heads,
        "BLOCK_M": block_m,
        "BLOCK_N": tile_of_tokens(head_dim, query.dtype, has_codes=layer.k_scales is not None),
        "SPLIT": SPLIT,
        "BLOCK_SIZE": block_size,
        "RUN": layer.k_cache.stride(1),
        "SCALE_RUN": 0 if layer.k_scales is None else layer.k_scales.stride(1),
        "HEAD_DIM": head_dim,
        "DIM": max(_MIN_DOT, next_power_of_2(head_dim)),
        "WINDOW": layer.window or 0,
        "SOFT_CAP": layer.soft_cap or 0.0,
        "QUANTIZED": layer.k_scales is not None,
        "COMPUTE": compute_dtype(query.dtype),
    }


def tile_of_tokens(head_dim: int, dtype: torch.dtype, *, has_codes: bool) -> int:
    """BLOCK_N, one for decode and prefill: keys and values of a tile take at most 16 KiB each, 8 KiB if they come from
    codes, which pass through registers on their way to the product."""
    num_bytes, most = 8192 if has_codes else 16384, 32 if dtype == torch.float32 else 64
    return max(16, min(most, num_bytes // next_power_of_2(head_dim) // dtype.itemsize))


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """Of the operands of matrix products. The interpreter multiplies bfloat16 as if it were integers."""
    return tl.float32 if triton.knobs.runtime.interpret else _COMPUTE[dtype]
