"""Public entry of the cache write. The layout of the cache is described in kernels/paged_attention/api.py."""

import torch

from kernels.cache_write import reference
from kernels.checks import require, same_place


def cache_write(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store the keys and values of a step.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim].
        k_cache, v_cache: [num_blocks, num_kv_heads, block_size, head_dim] of one layer, written in place.
        slot_mapping: [num_tokens] int64, `block_id * block_size + offset`; no slot twice. The caller vouches for the
            range: checking it would read the tensor back from the device.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    shapes = f"key {tuple(key.shape)}, value {tuple(value.shape)}, {tuple(slot_mapping.shape)} slots"
    require(key.dim() == 3 and key.shape == value.shape, f"cache_write: {shapes}")
    require(k_cache.dim() == 4 and k_cache.shape == v_cache.shape, f"cache_write: cache {tuple(k_cache.shape)}")
    heads = (k_cache.shape[1], k_cache.shape[3])
    require(key.shape[1:] == heads, f"cache_write: heads {tuple(key.shape[1:])}, cache has {heads}")
    require(slot_mapping.shape == key.shape[:1], f"cache_write: {shapes}")
    require(slot_mapping.dtype == torch.int64, "cache_write: slot_mapping must be int64")
    require(same_place(key, value, k_cache, v_cache), "cache_write: tensors differ in dtype or device")
    reference.cache_write(key, value, k_cache, v_cache, slot_mapping)
