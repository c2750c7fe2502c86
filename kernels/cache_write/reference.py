"""Scatter of new keys and values into the paged cache, in torch."""

import torch

from kernels.kv_codec import reference as codec

Plain = tuple[torch.Tensor, torch.Tensor | None]
"""Numbers or codes [num_blocks, num_kv_heads, block_size, head_dim], and the scales of codes."""


def cache_write(
    key: torch.Tensor, value: torch.Tensor, k_cache: Plain, v_cache: Plain, slot_mapping: torch.Tensor
) -> None:
    """Write token i of `key` and `value` to slot `slot_mapping[i]`."""
    block_size = k_cache[0].shape[2]
    at = (slot_mapping // block_size, slot_mapping % block_size)
    for numbers, (cache, scales) in ((key, k_cache), (value, v_cache)):
        if scales is not None:
            numbers, scales_of = codec.encode(numbers, scales.dtype, cache.dtype)
            scales.transpose(1, 2).index_put_(at, scales_of)
        cache.transpose(1, 2).index_put_(at, numbers)
