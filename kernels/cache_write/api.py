"""Public entry of the cache write. The layout of the cache is described in kernels/paged_attention/api.py."""

import torch

from kernels.cache_write import native, reference
from kernels.checks import library_of_packed, require, same_place
from kernels.kv_layout.api import is_packed, run_shape
from kernels.launch import runs_triton


def cache_write(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store the keys and values of a step.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim].
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim] of one layer, or packed
            (kernels/kv_layout); written in place. Packed ones in bfloat16 also take float32, and round it.
        slot_mapping: [num_tokens] int64, `block_id * block_size + offset`; no slot twice. The caller vouches for the
            range: checking it would read the tensor back from the device.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    shapes = f"key {tuple(key.shape)}, value {tuple(value.shape)}, {tuple(slot_mapping.shape)} slots"
    require(key.dim() == 3 and key.shape == value.shape, f"cache_write: {shapes}")
    num_kv_heads, _, head_dim = run_shape(k_cache)
    require(k_cache.numel() == v_cache.numel(), f"cache_write: cache {tuple(k_cache.shape)} {tuple(v_cache.shape)}")
    require(key.shape[1:] == (num_kv_heads, head_dim), f"cache_write: {shapes}, cache {tuple(k_cache.shape)}")
    require(slot_mapping.shape == key.shape[:1], f"cache_write: {shapes}")
    require(slot_mapping.dtype == torch.int64, "cache_write: slot_mapping must be int64")
    require(same_place(key, value) and same_place(k_cache, v_cache), "cache_write: tensors differ in dtype or device")
    if not is_packed(k_cache):
        require(same_place(key, k_cache), "cache_write: tensors differ in dtype or device")
        _write_plain(key, value, k_cache, v_cache, slot_mapping)
        return
    require(key.dtype in (k_cache.dtype, torch.float32), f"cache_write: {key.dtype} to {k_cache.dtype}")
    library = library_of_packed("cache_write")
    native.rope_cache_write(library, None, key, value, k_cache, v_cache, slot_mapping)


def _write_plain(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    if not runs_triton(key):
        reference.cache_write(key, value, k_cache, v_cache, slot_mapping)
        return
    from kernels.cache_write import triton

    triton.cache_write(key[:, :0], key, value, triton.Slots(k_cache, v_cache, None, None, slot_mapping))
