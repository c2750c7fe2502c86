"""Paged attention by the C++ kernels, over a packed cache (kernels/kv_layout)."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.kv_layout.api import run_shape
from kernels.native.library import Float, Int, Library, Pointer

IntArray = npt.NDArray[np.int64]


KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""As in attention.h."""


class TokenHeads(ctypes.Structure):
    """As in attention.h."""

    _fields_ = (("data", Pointer), ("stride", Int), ("is_bf16", Int))


class KvLayer(ctypes.Structure):
    """As in attention.h."""

    _fields_ = (
        ("keys", Pointer),
        ("values", Pointer),
        ("block_stride", Int),
        ("num_kv_heads", Int),
        ("block_size", Int),
        ("head_dim", Int),
        ("type", Int),
    )


class Rows(ctypes.Structure):
    """As in attention.h."""

    _fields_ = (
        ("query_lens", Pointer),
        ("context_lens", Pointer),
        ("block_tables", Pointer),
        ("table_stride", Int),
        ("num_rows", Int),
    )


class _Options(ctypes.Structure):
    _fields_ = (("num_heads", Int), ("window", Int), ("pairs", Int), ("scale", Float), ("soft_cap", Float))


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """Lengths and tables of a step as the kernel reads them."""

    num_tokens: int
    query_lens: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]

    @property
    def rows(self) -> Rows:
        """Points into the arrays."""
        tables = self.block_tables
        # `array.ctypes.data` is the same, and takes several times as long.
        pointers = [a.__array_interface__["data"][0] for a in (self.query_lens, self.context_lens, tables)]
        return Rows(*pointers, tables.shape[1], len(tables))


def token_heads(tensor: torch.Tensor) -> TokenHeads:
    """Of [num_tokens, num_heads, head_dim] whose inner two dimensions are contiguous."""
    return TokenHeads(tensor.data_ptr(), tensor.stride(0), tensor.dtype == torch.bfloat16)


def with_contiguous_heads(tensor: torch.Tensor) -> torch.Tensor:
    """The same [num_tokens, num_heads, head_dim], copied unless the heads of a token lie side by side."""
    *_, head_dim = tensor.shape
    return tensor if tensor.stride()[1:] == (head_dim, 1) else tensor.contiguous()


def kv_layer(k_cache: torch.Tensor, v_cache: torch.Tensor) -> KvLayer:
    """Of packed keys and values."""
    block_stride = k_cache.stride(0) * k_cache.element_size()
    return KvLayer(k_cache.data_ptr(), v_cache.data_ptr(), block_stride, *run_shape(k_cache), KV_TYPES[k_cache.dtype])


def prepare(query_lens: IntArray, context_lens: IntArray, block_tables: torch.Tensor) -> NativeBatch:
    """See api.prepare."""
    tables = np.ascontiguousarray(block_tables.numpy(), np.int32)
    return NativeBatch(int(query_lens.sum()), query_lens.astype(np.int32), context_lens.astype(np.int32), tables)


def paged_attention(
    library: Library,
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: NativeBatch,
    *,
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
    pairs: bool | None = None,
) -> torch.Tensor:
    """See api.paged_attention. `pairs`: bfloat16 is multiplied in pairs; by default where the CPU has an instruction
    for it, elsewhere that way is only good for tests."""
    query = with_contiguous_heads(query)
    out = torch.empty(query.shape, dtype=query.dtype)
    if pairs is None:
        pairs = bool(library.function("pw_has_pair_products", result=Int)())
    run = library.function("pw_paged_attention", *[Pointer] * 5)
    arguments = (
        token_heads(query),
        token_heads(out),
        kv_layer(k_cache, v_cache),
        batch.rows,
        _Options(query.shape[1], window, pairs, scale, soft_cap),
    )
    run(*map(ctypes.byref, arguments))
    return out
