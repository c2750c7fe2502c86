"""Blocks in main memory beside the KV cache: of requests that are swapped out, and of prefixes that were demoted.

The scheduler owns the ids of both; the worker only copies. A pool holds blocks either as they are or, if asked for, as
int8 with scales: a quarter (float32) or half (bfloat16) of the memory, but not exactly what was stored.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels.block_copy.api import copy_blocks, find_runs
from kernels.kv_codec.api import SCALE_DTYPE, bytes_per_vector, decode, encode
from kernels.kv_layout.api import holds_codes
from services.gpu_worker.cache.kv_cache import KVCache, kv_bytes_per_block
from services.gpu_worker.models.config import ModelConfig
from shared.errors import ConfigError

IntArray = npt.NDArray[np.int64]

_PIECE = 4
"""Blocks that are encoded at once: bounds the temporary memory of a long swap. Measured on blocks of 737 kB, 4 were as
fast as any of 1, 2, 4 and 16."""


class HostPool(Protocol):
    """Blocks of the shape of one KV cache. Pairs are (source, destination), [n, 2]; the caller checked their range."""

    @property
    def num_blocks(self) -> int: ...

    def store(self, cache: KVCache, pairs: IntArray) -> None:
        """Copy blocks of the cache to blocks of the pool."""

    def load(self, cache: KVCache, pairs: IntArray) -> None:
        """Copy blocks of the pool to blocks of the cache."""


class PlainPool:
    """Blocks as they are."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self.data = _allocate(cache, (num_blocks, *cache.data.shape[1:]), cache.data.dtype)

    @property
    def num_blocks(self) -> int:
        return len(self.data)

    def store(self, cache: KVCache, pairs: IntArray) -> None:
        copy_blocks(cache.data, self.data, pairs)

    def load(self, cache: KVCache, pairs: IntArray) -> None:
        copy_blocks(self.data, cache.data, pairs)


class Int8Pool:
    """Blocks as int8 codes with one scale per token and head (kernels/kv_codec), in the plain layout. Encoded where the
    cache lies, so that a GPU's bus carries the short form."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        shape = (num_blocks, *cache.data.shape[1:])
        self.codes = _allocate(cache, shape, torch.int8)
        self.scales = _allocate(cache, shape[:-1], SCALE_DTYPE)

    @property
    def num_blocks(self) -> int:
        return len(self.codes)

    def store(self, cache: KVCache, pairs: IntArray) -> None:
        for source, to, length in _pieces(pairs):
            codes, scales = encode(cache.read(slice(source, source + length)))
            self.codes[to : to + length].copy_(codes, non_blocking=True)
            self.scales[to : to + length].copy_(scales, non_blocking=True)

    def load(self, cache: KVCache, pairs: IntArray) -> None:
        device = cache.data.device
        for source, to, length in _pieces(pairs):
            codes = self.codes[source : source + length].to(device, non_blocking=True)
            scales = self.scales[source : source + length].to(device, non_blocking=True)
            cache.write(to, decode(codes, scales, cache.data.dtype))


def allocate_pool(cache: KVCache, num_blocks: int, dtype: str = "auto") -> HostPool:
    """A pool of `num_blocks` blocks, possibly 0; `dtype` is `auto` (that of the cache) or `int8`. A cache of codes is
    copied as it is.

    Raises:
        ConfigError: the machine has no room.
    """
    try:
        return (Int8Pool if encodes(cache.data.dtype, dtype) else PlainPool)(cache, num_blocks)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"no room for {num_blocks} KV blocks in main memory: {error}") from error


def pool_bytes_per_block(config: ModelConfig, block_size: int, cache_dtype: torch.dtype, dtype: str) -> int:
    """Bytes of main memory that one block takes in a pool of this dtype."""
    if encodes(cache_dtype, dtype):
        return 2 * config.num_layers * config.num_kv_heads * block_size * bytes_per_vector(config.head_dim)
    return kv_bytes_per_block(config, block_size, cache_dtype)


def encodes(cache_dtype: torch.dtype, dtype: str) -> bool:
    """Whether a pool of this dtype holds less than what the cache does."""
    return dtype == "int8" and not holds_codes(cache_dtype)


def _allocate(cache: KVCache, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=cache.data.device.type == "cuda")


def _pieces(pairs: IntArray) -> list[tuple[int, int, int]]:
    """Runs of (source, destination, length), none longer than `_PIECE`."""
    return [
        (source + at, to + at, min(_PIECE, length - at))
        for source, to, length in find_runs(pairs).tolist()
        for at in range(0, length, _PIECE)
    ]
