"""The two layouts of the paged KV cache.

`PLAIN`, for torch and Triton: one layer's K and V are each [num_blocks, num_kv_heads, block_size, head_dim]. Of codes
(int8, float8_e4m3fn) the last dimension is `head_dim + 2`: a run holds the codes of its tokens, and behind them two
bytes of scale for each (codes.py).

`PACKED`, for the C++ kernels: 32-bit words hold `group` numbers (2 of bfloat16, 1 of float32), and so that vectors of
words need no sum across their lanes, the run of a (block, kv head) pair is ordered

    K  [num_blocks, num_kv_heads, head_dim / group, block_size, group]     a word: `group` dimensions of one token
    V  [num_blocks, num_kv_heads, block_size / group, head_dim, group]     a word: one dimension of `group` tokens

An int8 cache is packed in another way (codes.py); its memory is of the same shape as in the plain layout, and its views
are [num_blocks, num_kv_heads, 1, block_size, head_dim + 2].

The number of dimensions tells the layouts apart. A run takes the same memory in both, so whatever moves whole blocks
need not know which it is.
"""

from enum import StrEnum

import torch

from kernels.checks import require
from kernels.kv_codec import reference
from kernels.kv_layout import codes


class KVLayout(StrEnum):
    """Order of the numbers within a (block, kv head) run."""

    PLAIN = "plain"
    PACKED = "packed"


def group_size(dtype: torch.dtype) -> int:
    """Numbers in a 32-bit word; 0 for a type that the packed layout does not know."""
    return {torch.float32: 1, torch.bfloat16: 2}.get(dtype, 0)


def can_pack(dtype: torch.dtype, block_size: int, head_dim: int) -> bool:
    """Whether runs of this shape divide into whole words, or scales of int8 codes lie on even bytes."""
    if dtype == torch.int8:
        return are_scales_aligned(block_size, head_dim)
    group = group_size(dtype)
    return group > 0 and block_size % group == 0 and head_dim % group == 0


def are_scales_aligned(block_size: int, head_dim: int) -> bool:
    """Whether the scales behind the codes of a run lie on even bytes."""
    return block_size * head_dim % 2 == 0


def holds_codes(dtype: torch.dtype) -> bool:
    """Whether a cache of this dtype holds codes and scales instead of numbers."""
    return dtype in codes.DTYPES


def vector_width(dtype: torch.dtype, head_dim: int) -> int:
    """Elements of the cache's dtype that one vector takes."""
    return codes.width(head_dim) if holds_codes(dtype) else head_dim


def meets(dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether queries, keys and values of `dtype` go with a packed cache: as it is stored, or wider."""
    wider = (torch.float32, torch.bfloat16) if cache_dtype == torch.int8 else (torch.float32,)
    return dtype in wider or dtype == cache_dtype != torch.int8


def is_packed(cache: torch.Tensor) -> bool:
    """Whether a layer's K or V is in the packed layout."""
    return cache.dim() == 5


def run_shape(k_cache: torch.Tensor) -> tuple[int, int, int]:
    """(num_kv_heads, block_size, head_dim) of a layer's keys, in either layout."""
    if is_packed(k_cache):
        _, num_kv_heads, words, block_size, group = k_cache.shape
        if k_cache.dtype == torch.int8:
            return num_kv_heads, block_size, group - codes.width(0)
        return num_kv_heads, block_size, words * group
    width = k_cache.shape[3] - codes.width(0) if holds_codes(k_cache.dtype) else k_cache.shape[3]
    return k_cache.shape[1], k_cache.shape[2], width


def split_plain(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A plain cache as kernels take it: numbers or codes [..., block_size, head_dim], and the scales [..., block_size]
    of codes. Views."""
    return codes.split_plain(cache) if holds_codes(cache.dtype) else (cache, None)


def read_plain(cache: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers [..., block_size, head_dim] of a plain cache: itself, or what its codes stand for, in `dtype` (float32 by
    default) and new memory."""
    values, scales = split_plain(cache)
    return values if scales is None else reference.decode(values, scales, dtype or torch.float32)


def write_plain(plain: torch.Tensor, cache: torch.Tensor) -> None:
    """Store [..., block_size, head_dim] in a plain cache of numbers or codes."""
    values, scales = split_plain(cache)
    if scales is None:
        cache.copy_(plain)
        return
    codes_of, scales_of = reference.encode(plain, scales.dtype, values.dtype)
    values.copy_(codes_of)
    scales.copy_(scales_of)


def view_keys(memory: torch.Tensor) -> torch.Tensor:
    """A layer's memory [..., block_size, head_dim] as packed keys [..., head_dim / group, block_size, group]."""
    return _view(memory, memory.shape[-1], memory.shape[-2])


def view_values(memory: torch.Tensor) -> torch.Tensor:
    """A layer's memory [..., block_size, head_dim] as packed values [..., block_size / group, head_dim, group]."""
    return _view(memory, memory.shape[-2], memory.shape[-1])


def unpack_keys(packed: torch.Tensor) -> torch.Tensor:
    """[..., head_dim / group, block_size, group] -> [..., block_size, head_dim], new memory; float32 of int8 codes."""
    if packed.dtype == torch.int8:
        return codes.decode(packed[..., 0, :, :], is_keys=True)
    return packed.transpose(-3, -2).flatten(-2).contiguous()


def unpack_values(packed: torch.Tensor) -> torch.Tensor:
    """[..., block_size / group, head_dim, group] -> [..., block_size, head_dim], new memory; float32 of int8 codes."""
    if packed.dtype == torch.int8:
        return codes.decode(packed[..., 0, :, :], is_keys=False)
    return packed.transpose(-2, -1).flatten(-3, -2).contiguous()


def pack_keys(plain: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy keys [..., block_size, head_dim] into `packed`, the view of `view_keys`."""
    if packed.dtype == torch.int8:
        codes.encode(plain, packed[..., 0, :, :], is_keys=True)
        return
    packed.copy_(plain.unflatten(-1, (-1, packed.shape[-1])).transpose(-3, -2))


def pack_values(plain: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy values [..., block_size, head_dim] into `packed`, the view of `view_values`."""
    if packed.dtype == torch.int8:
        codes.encode(plain, packed[..., 0, :, :], is_keys=False)
        return
    packed.copy_(plain.unflatten(-2, (-1, packed.shape[-1])).transpose(-2, -1))


def _view(memory: torch.Tensor, grouped: int, other: int) -> torch.Tensor:
    if memory.dtype == torch.int8:
        return memory.unsqueeze(-3)
    group = group_size(memory.dtype)
    fits = group > 0 and grouped % group == 0
    require(fits, f"packed KV: {tuple(memory.shape)} of {memory.dtype} does not divide into words")
    return memory.view(*memory.shape[:-2], grouped // group, other, group)
