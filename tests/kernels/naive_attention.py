"""Attention as its definition says, one query at a time, in float64: what kernels are checked against."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.kv_codec import reference as codec
from kernels.kv_layout.api import split_plain, vector_width


@dataclass(slots=True)
class PagedCase:
    """A random step over a paged cache whose unused slots are NaN, and the dense keys and values behind it."""

    query_lens: np.ndarray
    context_lens: np.ndarray
    query: torch.Tensor
    keys: list[torch.Tensor]
    """Per row [context, num_kv_heads, head_dim]."""
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor

    def expected(self, scale: float, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim] float64."""
        rows = []
        starts = np.cumsum(self.query_lens) - self.query_lens
        for row, start in enumerate(starts.tolist()):
            length, context = int(self.query_lens[row]), int(self.context_lens[row])
            for i in range(length):
                end = context - length + i + 1
                seen = slice(0 if window is None else max(0, end - window), end)
                keys, values = self.keys[row][seen], self.values[row][seen]
                rows.append(_attend(self.query[start + i], keys, values, scale, soft_cap))
        return torch.stack(rows)

    def coded(self, code: torch.dtype) -> "PagedCase":
        """The same step over a cache of codes, whose unused slots are codes and scales of NaN, and the keys and values
        that the codes stand for."""
        num_blocks, num_kv_heads, block_size, head_dim = self.k_cache.shape
        shape = (num_blocks, 3, 2, num_kv_heads, block_size, vector_width(code, head_dim))
        layers = torch.full(shape, -1, dtype=torch.int8).view(code)
        caches = layers[:, 1, 0], layers[:, 1, 1]
        for plain, cache in zip((self.k_cache, self.v_cache), caches, strict=True):
            written = ~plain.isnan().any(-1)
            codes, scales = split_plain(cache)
            assert scales is not None
            codes[written], scales[written] = codec.encode(plain[written], scales.dtype, code)

        def decoded(rows: list[torch.Tensor]) -> list[torch.Tensor]:
            return [codec.decode(*codec.encode(row, torch.float16, code), torch.float32) for row in rows]

        return replace(self, keys=decoded(self.keys), values=decoded(self.values), k_cache=caches[0], v_cache=caches[1])


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, soft_cap: float | None
) -> torch.Tensor:
    """[num_heads, head_dim]; query head h reads KV head h // group."""
    grouped = query.double().view(keys.shape[1], -1, query.shape[1])
    scores = torch.einsum("kgd,tkd->kgt", grouped, keys.double()) * scale
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    return torch.einsum("kgt,tkd->kgd", scores.softmax(-1), values.double()).reshape(query.shape)


def paged_case(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    spare_blocks: int = 3,
    seed: int = 0,
) -> PagedCase:
    """Rows scattered over shuffled blocks of a block-major cache of several layers, NaN wherever nothing is written."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    needed = [-(-context // block_size) for context in context_lens]
    total = sum(needed) + spare_blocks
    layers = torch.full((total, 3, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    k_cache, v_cache = layers[:, 1, 0], layers[:, 1, 1]
    order = torch.randperm(total, generator=generator).tolist()
    tables = torch.full((len(needed), max(needed) + 2), order[-1], dtype=torch.int32)
    keys, values = [], []
    for row, (blocks, context) in enumerate(zip(needed, context_lens, strict=True)):
        mine = [order.pop(0) for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(mine, dtype=torch.int32)
        keys.append(random(context, num_kv_heads, head_dim))
        values.append(random(context, num_kv_heads, head_dim))
        for position in range(context):
            block, offset = mine[position // block_size], position % block_size
            k_cache[block, :, offset] = keys[-1][position]
            v_cache[block, :, offset] = values[-1][position]
    query = random(sum(query_lens), num_heads, head_dim)
    return PagedCase(np.array(query_lens), np.array(context_lens), query, keys, values, k_cache, v_cache, tables)
