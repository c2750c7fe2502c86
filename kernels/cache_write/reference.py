"""Scatter of new keys and values into the paged cache, in torch."""

import torch


def cache_write(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write token i of `key` and `value` to slot `slot_mapping[i]`."""
    block_size = k_cache.shape[2]
    at = (slot_mapping // block_size, slot_mapping % block_size)
    k_cache.transpose(1, 2).index_put_(at, key)
    v_cache.transpose(1, 2).index_put_(at, value)
