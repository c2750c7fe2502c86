"""Public entry of attention over the paged KV cache.

Cache layout. One layer's `k_cache` and `v_cache` are views of shape [num_blocks, num_kv_heads, block_size, head_dim].
The three inner dimensions are contiguous, so that a (block, head) pair is one run of `block_size * head_dim` elements;
the stride between blocks is free (a multiple of that run) and equal in all layers and in K and V. A token at position p
of a row lives in block `block_tables[row, p // block_size]` at offset `p % block_size`; its slot is
`block_id * block_size + offset`. Slots that no token of the row has reached may hold anything, NaN included. A run of
codes (int8, fp8) is longer by the scales of its tokens; the C++ kernels read the packed layout instead, which orders
the numbers within a run differently (kernels/kv_layout/api.py).

A step's batch is a sequence of rows, each with `query_len >= 1` new tokens at the end of a context of `context_len`
tokens (the new ones included, their keys and values already written). Decode is `query_len == 1`, a prefill chunk is
anything longer; both kinds mix freely. Attention is causal:

    position          0 ........ context_len - query_len ........ context_len - 1
    query token i sees 0 ........ context_len - query_len + i

A layer may look back less far: with a `window` of w, a query at position p sees `max(0, p - w + 1) ........ p`, the
last w tokens, itself included. With a `soft_cap` of c, a scaled score s becomes `c * tanh(s / c)` before the softmax.

`prepare` turns the lengths and block tables into index tensors once per step; `paged_attention` runs per layer.
"""

import numpy as np
import numpy.typing as npt
import torch

from kernels.checks import library_of_packed, require, same_place
from kernels.kv_layout.api import holds_codes, is_packed, meets, run_shape, split_plain
from kernels.launch import runs_triton, triton_version
from kernels.native.library import level_name
from kernels.paged_attention import gpu_batch, native, reference

__all__ = ["AttentionBatch", "implementation", "paged_attention", "prepare"]

IntArray = npt.NDArray[np.int64]

AttentionBatch = reference.TorchBatch | native.NativeBatch | gpu_batch.GpuBatch
"""What `prepare` found out about a step."""


def implementation(device: torch.device) -> str:
    """Name of what computes attention on a device: part of the numerics fingerprint."""
    if device.type == "cpu":
        return level_name()
    return triton_version() or "torch"


def prepare(
    query_lens: IntArray, context_lens: IntArray, block_tables: torch.Tensor, k_cache: torch.Tensor
) -> AttentionBatch:
    """Index tensors of one step, shared by its layers.

    Args:
        query_lens: [num_rows], host; new tokens per row, in the order of the flat token batch.
        context_lens: [num_rows], host; tokens that the last query of the row attends to.
        block_tables: [num_rows, max_blocks] int32 on the cache's device. Entries past a row's context may hold any
            valid block id.
        k_cache: of any layer; only shape, strides and device are read.

    Raises:
        ValueError: shapes do not fit, a row has no query, or a context exceeds the table.
    """
    require(k_cache.dim() in (4, 5) and k_cache[0].is_contiguous(), "prepare: a block of the cache is not contiguous")
    fits = query_lens.ndim == 1 and query_lens.shape == context_lens.shape
    require(fits, "prepare: one query and one context length per row")
    require(block_tables.dim() == 2 and len(block_tables) == len(query_lens), "prepare: one block table per row")
    if len(query_lens):
        sound = bool((query_lens >= 1).all() and (query_lens <= context_lens).all())
        require(sound, "prepare: 1 <= query_len <= context_len")
        capacity = block_tables.shape[1] * run_shape(k_cache)[1]
        require(int(context_lens.max()) <= capacity, f"prepare: a context exceeds the table's {capacity} tokens")
    if is_packed(k_cache):
        return native.prepare(query_lens, context_lens, block_tables)
    if runs_triton(k_cache):
        return gpu_batch.prepare(query_lens, context_lens, block_tables)
    return reference.prepare(query_lens, context_lens, block_tables, k_cache)


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attention of one layer.

    Args:
        query: [num_tokens, num_heads, head_dim], rows in the order given to `prepare`; `num_heads` is a multiple of the
            cache's heads, and query head h reads KV head `h // (num_heads / num_kv_heads)`.
        k_cache, v_cache: one layer, laid out as above, the step's keys and values already written.
        batch: from `prepare`.
        scale: factor on the scores.
        window: most tokens that a query sees, itself included, at least 1; None for all of its context.
        soft_cap: bound of the scaled scores, above 0; None for none.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous.

    A packed cache in bfloat16 also takes float32 queries, one of codes takes any; the result has the queries' dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or window or soft cap are out of range.
    """
    require(window is None or window >= 1, f"paged_attention: window {window}")
    require(soft_cap is None or soft_cap > 0, f"paged_attention: soft cap {soft_cap}")
    require(query.dim() == 3, f"paged_attention: query {tuple(query.shape)}")
    queries = query.shape[0]
    require(queries == batch.num_tokens, f"paged_attention: {queries} queries, the batch has {batch.num_tokens}")
    if isinstance(batch, native.NativeBatch):
        return _native(query, k_cache, v_cache, batch, scale, window, soft_cap)
    alike = k_cache.shape == v_cache.shape and k_cache.stride() == v_cache.stride()
    require(alike and k_cache.dim() == 4, "paged_attention: K and V cache differ")
    _require_heads(query, k_cache)
    fits = same_place(k_cache, v_cache) and query.device == k_cache.device
    fits &= query.is_floating_point() if holds_codes(k_cache.dtype) else query.dtype == k_cache.dtype
    require(fits, "paged_attention: tensors differ in dtype or device")
    if isinstance(batch, gpu_batch.GpuBatch):
        from kernels.paged_attention import triton

        (keys, k_scales), (values, v_scales) = split_plain(k_cache), split_plain(v_cache)
        layer = triton.Layer(keys, values, k_scales, v_scales, scale, window, soft_cap)
        return triton.paged_attention(query, layer, batch)
    return reference.paged_attention(query, k_cache, v_cache, batch, scale, window, soft_cap)


def _native(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: native.NativeBatch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    alike = k_cache.numel() == v_cache.numel() and k_cache.stride(0) == v_cache.stride(0)
    require(alike and is_packed(k_cache) and is_packed(v_cache), "paged_attention: K and V cache differ")
    _require_heads(query, k_cache)
    fits = meets(query.dtype, k_cache.dtype) and k_cache.dtype == v_cache.dtype
    require(fits and query.device.type == "cpu", "paged_attention: tensors differ in dtype or device")
    library = library_of_packed("paged_attention")
    return native.paged_attention(
        library, query, k_cache, v_cache, batch, scale=scale, soft_cap=soft_cap or 0.0, window=window or 0
    )


def _require_heads(query: torch.Tensor, k_cache: torch.Tensor) -> None:
    num_kv_heads, _, head_dim = run_shape(k_cache)
    require(
        query.shape[2] == head_dim and query.shape[1] % num_kv_heads == 0,
        f"paged_attention: query {tuple(query.shape)}, cache {tuple(k_cache.shape)}",
    )
