"""The paged KV cache of one worker.

One allocation, block-major: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]. A block is one run of
memory over all layers, and neighbouring blocks are neighbours in memory: moving a run of blocks is one copy. A layer's
K and V are views with the block stride that kernels/paged_attention/api.py allows.
"""

from dataclasses import dataclass

import torch

from services.gpu_worker.models.config import ModelConfig
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of `num_blocks` blocks. Fresh memory is not cleared: no slot counts before it is written."""

    data: torch.Tensor

    @classmethod
    def allocate(
        cls, model_config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> "KVCache":
        """Reserve the cache.

        Raises:
            ConfigError: sizes below one, or the device has no room.
        """
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"the KV cache needs at least one block of one token, not {num_blocks} of {block_size}")
        shape = (
            num_blocks,
            model_config.num_layers,
            2,
            model_config.num_kv_heads,
            block_size,
            model_config.head_dim,
        )
        try:
            return cls(torch.empty(shape, dtype=dtype, device=device))
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"no room for {num_blocks} KV blocks of {block_size} tokens: {error}") from error

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def num_layers(self) -> int:
        return self.data.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.data.shape[4]

    @property
    def bytes_per_block(self) -> int:
        return self.data[0].nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self.data[:, index, 0], self.data[:, index, 1]


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size * dtype.itemsize


def num_blocks_for(memory_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Blocks that fit `memory_bytes`; 0 if not even one does."""
    return max(0, memory_bytes) // kv_bytes_per_block(config, block_size, dtype)
