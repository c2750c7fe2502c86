"""The cache write, with the rotation of queries and keys, by the C++ kernels. Structures as in cache_write.h."""

import ctypes
from typing import NamedTuple

import torch

from kernels.native.library import Float, Int, Library, Pointer
from kernels.paged_attention.native import TokenHeads, kv_layer, token_heads, with_contiguous_heads


class _Projections(ctypes.Structure):
    _fields_ = (("queries", TokenHeads), ("keys", TokenHeads), ("values", TokenHeads), ("num_heads", Int))


class _Rotation(ctypes.Structure):
    _fields_ = (("table", Pointer), ("positions", Pointer), ("dims", Int))


class _HeadNorms(ctypes.Structure):
    _fields_ = (("query", Pointer), ("key", Pointer), ("eps", Float))


class Rotation(NamedTuple):
    """Rotary embedding of the first `table.shape[1]` dimensions of a head."""

    table: torch.Tensor
    """[num_positions, dims] float32: cosines of dims / 2 angles, then their sines."""
    positions: torch.Tensor
    """[num_tokens] int64: rows of the table."""


class HeadNorms(NamedTuple):
    """RMSNorm of each head before it turns."""

    query: torch.Tensor
    """[head_dim] float32."""
    key: torch.Tensor
    eps: float


def rope_cache_write(
    library: Library,
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    rotation: Rotation | None = None,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Store keys and values in a packed cache; the queries, rotated, in new memory.

    Args:
        query: [num_tokens, num_heads, head_dim], or None where only keys and values are of interest.
        key, value: [num_tokens, num_kv_heads, head_dim].
        k_cache, v_cache: packed (kernels/kv_layout).
        slot_mapping: [num_tokens] int64.
    """
    key, value = with_contiguous_heads(key), with_contiguous_heads(value)
    kept = with_contiguous_heads(query) if query is not None else key[:, :0]
    out = torch.empty(kept.shape, dtype=kept.dtype)
    projections = _Projections(token_heads(kept), token_heads(key), token_heads(value), kept.shape[1])
    turn, norm = _Rotation(None, None, 0), _HeadNorms(None, None, 0.0)
    if rotation is not None:
        turn = _Rotation(rotation.table.data_ptr(), rotation.positions.data_ptr(), rotation.table.shape[1])
    if norms is not None:
        norm = _HeadNorms(norms.query.data_ptr(), norms.key.data_ptr(), norms.eps)
    run = library.function("pw_rope_cache_write", *[Pointer] * 4, Int, *[Pointer] * 2)
    run(
        ctypes.byref(projections),
        ctypes.byref(token_heads(out)),
        ctypes.byref(kv_layer(k_cache, v_cache)),
        slot_mapping.data_ptr(),
        len(key),
        ctypes.byref(turn),
        ctypes.byref(norm),
    )
    return out
