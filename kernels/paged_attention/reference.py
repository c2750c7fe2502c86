"""Paged attention in torch: one gather and two batched products per group of decode rows, one call per prefill chunk.

Decode rows are grouped by the number of blocks of their context, rounded up to the next of 1, 2, 3, 4, 6, 8, 12, 16, …
So a long row does not make its neighbours read padding, and the shape in which a row is computed depends on nothing but
its own length.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.kv_layout.api import read_plain

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one query each and padded contexts of equal length T."""

    tokens: torch.Tensor | None
    """[B] places in the flat batch; None if the group is the whole batch in order."""
    runs: torch.Tensor
    """[B * num_kv_heads * blocks] (block, head) runs to gather, row-major."""
    unseen: torch.Tensor
    """[B, 1, 1, T] bool, true past the row's context."""
    context_lens: torch.Tensor
    """[B, 1, 1, 1] int64."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row with several queries."""

    start: int
    """Of its queries in the flat batch."""
    num_queries: int
    context_len: int
    runs: torch.Tensor
    """[num_kv_heads * blocks] (block, head) runs to gather."""
    seen: torch.Tensor | None
    """[num_queries, context_len] bool; None if the chunk is its whole context (plain causal)."""


@dataclass(frozen=True, slots=True)
class TorchBatch:
    """What `prepare` found out about a step."""

    num_tokens: int
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def prepare(
    query_lens: IntArray, context_lens: IntArray, block_tables: torch.Tensor, k_cache: torch.Tensor
) -> TorchBatch:
    """See api.prepare."""
    starts = np.cumsum(query_lens) - query_lens
    decode = np.flatnonzero(query_lens == 1)
    needed = -(-context_lens[decode] // k_cache.shape[2])
    padded = np.minimum(_round_up(needed), block_tables.shape[1])
    groups = tuple(
        _decode_group(decode[padded == width], int(width), starts, context_lens, block_tables, k_cache)
        for width in np.unique(padded)
    )
    chunks = tuple(
        _chunk(int(row), int(starts[row]), int(query_lens[row]), int(context_lens[row]), block_tables, k_cache)
        for row in np.flatnonzero(query_lens > 1)
    )
    return TorchBatch(int(query_lens.sum()), groups, chunks)


def _round_up(blocks: IntArray) -> IntArray:
    """Up to the next power of two or 1.5 times a power of two."""
    power = 2 ** np.ceil(np.log2(np.maximum(blocks, 1))).astype(np.int64)
    return np.where((blocks <= power * 3 // 4) & (power >= 4), power * 3 // 4, power)


def _runs(block_ids: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
    """Indices of (block, head) runs in `_as_runs`: [B, blocks] -> [B * num_kv_heads * blocks]."""
    num_kv_heads, block_size, width = k_cache.shape[1:]
    runs_per_block = k_cache.stride(0) // (block_size * width)
    heads = torch.arange(num_kv_heads, device=k_cache.device)
    return (block_ids.long()[:, None, :] * runs_per_block + heads[None, :, None]).reshape(-1)


def _as_runs(cache: torch.Tensor) -> torch.Tensor:
    """The layer's memory as rows of one (block, head) run each. Rows of other layers lie in between."""
    num_blocks, num_kv_heads, block_size, width = cache.shape
    run = block_size * width
    rows = (num_blocks - 1) * (cache.stride(0) // run) + num_kv_heads
    return cache.as_strided((rows, run), (run, 1))


def _decode_group(
    rows: IntArray,
    width: int,
    starts: IntArray,
    context_lens: IntArray,
    block_tables: torch.Tensor,
    k_cache: torch.Tensor,
) -> DecodeGroup:
    device = k_cache.device
    unseen = np.arange(width * k_cache.shape[2]) >= context_lens[rows, None]
    whole = len(rows) == len(starts)
    tables = block_tables if whole else block_tables[torch.from_numpy(rows).to(device)]
    return DecodeGroup(
        tokens=None if whole else torch.from_numpy(starts[rows]).to(device),
        runs=_runs(tables[:, :width], k_cache),
        unseen=torch.from_numpy(unseen).to(device)[:, None, None],
        context_lens=torch.from_numpy(context_lens[rows]).to(device)[:, None, None, None],
    )


def _chunk(
    row: int, start: int, num_queries: int, context_len: int, block_tables: torch.Tensor, k_cache: torch.Tensor
) -> Chunk:
    blocks = -(-context_len // k_cache.shape[2])
    seen = _seen(num_queries, context_len, None, k_cache.device) if num_queries < context_len else None
    return Chunk(start, num_queries, context_len, _runs(block_tables[row : row + 1, :blocks], k_cache), seen)


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: TorchBatch,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """See api.paged_attention."""
    _, num_kv_heads, block_size, width = k_cache.shape
    memory = _as_runs(k_cache), _as_runs(v_cache)
    layer = _Layer(*memory, num_kv_heads, block_size, width, query.dtype, scale, window, soft_cap)
    if len(batch.groups) == 1 and batch.groups[0].tokens is None:
        return _decode(query, layer, batch.groups[0])
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in batch.groups:
        out[group.tokens] = _decode(query[group.tokens], layer, group)
    for chunk in batch.chunks:
        span = slice(chunk.start, chunk.start + chunk.num_queries)
        out[span] = _prefill(query[span], layer, chunk)
    return out


@dataclass(frozen=True, slots=True)
class _Layer:
    """One call's cache, as rows of (block, head) runs, and what shapes its scores."""

    keys: torch.Tensor
    values: torch.Tensor
    num_kv_heads: int
    block_size: int
    width: int
    """Elements that a token takes in a run."""
    dtype: torch.dtype
    """Of products: codes are decoded to it."""
    scale: float
    window: int | None
    soft_cap: float | None

    def gather(self, runs: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some rows, each [num_rows * num_kv_heads, T, head_dim]; `runs` as in DecodeGroup and Chunk."""
        k, v = (self._numbers(memory.index_select(0, runs)) for memory in (self.keys, self.values))
        shape = (num_rows * self.num_kv_heads, -1, k.shape[-1])
        return k.view(shape), v.view(shape)

    def _numbers(self, runs: torch.Tensor) -> torch.Tensor:
        """[n, block_size * width] -> [n, block_size, head_dim]."""
        return read_plain(runs.unflatten(-1, (self.block_size, self.width)), self.dtype)

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Scaled scores within the soft cap, if there is one."""
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)


def _decode(query: torch.Tensor, layer: _Layer, group: DecodeGroup) -> torch.Tensor:
    """[B, num_heads, head_dim] -> the same; the queries of one KV head are the rows of its products."""
    num_rows, num_heads, head_dim = query.shape
    pairs = num_rows * layer.num_kv_heads
    k, v = layer.gather(group.runs, num_rows)
    q = (query * layer.scale).reshape(pairs, num_heads // layer.num_kv_heads, head_dim)
    scores = layer.capped(torch.bmm(q, k.transpose(1, 2)))
    unseen = group.unseen if layer.window is None else group.unseen | _before_window(group, layer.window)
    scores.view(num_rows, layer.num_kv_heads, -1, scores.shape[-1]).masked_fill_(unseen, -torch.inf)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
    return _weighted_sum(weights, v, unseen).view(num_rows, num_heads, head_dim)


def _before_window(group: DecodeGroup, window: int) -> torch.Tensor:
    """[B, 1, 1, T] bool: the slots that have left the window of the row's last token."""
    positions = torch.arange(group.unseen.shape[-1], device=group.unseen.device)
    return positions < group.context_lens - window


def _weighted_sum(weights: torch.Tensor, v: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    """`weights @ v` over the slots that a row sees.

    A weight of zero does not silence a NaN in an unseen slot: 0 * NaN = NaN. Clearing those slots costs a pass over all
    values, so on a CPU, where looking at the result is free, it is done only if a NaN came out. Either way gives the
    same numbers, since zero times anything finite is zero.
    """
    if v.device.type == "cpu":
        out = torch.bmm(weights, v)
        if not math.isnan(out.sum().item()):  # a sum is the cheapest way to see a NaN anywhere
            return out
    by_row = v.view(len(unseen), -1, v.shape[1], v.shape[2])
    return torch.bmm(weights, by_row.masked_fill(unseen.transpose(2, 3), 0.0).view(v.shape))


def _prefill(query: torch.Tensor, layer: _Layer, chunk: Chunk) -> torch.Tensor:
    """[num_queries, num_heads, head_dim] -> the same."""
    k, v = (tensor[:, : chunk.context_len] for tensor in layer.gather(chunk.runs, 1))
    seen = chunk.seen if layer.window is None else _seen(chunk.num_queries, chunk.context_len, layer.window, k.device)
    if layer.soft_cap is not None:
        return _prefill_capped(query, k, v, layer, seen)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=seen,
        is_causal=seen is None,
        scale=layer.scale,
        enable_gqa=query.shape[1] != layer.num_kv_heads,
    )
    return out[0].transpose(0, 1)


def _prefill_capped(
    query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: _Layer, seen: torch.Tensor | None
) -> torch.Tensor:
    """With a soft cap, which torch's fused attention does not know."""
    num_queries, num_heads, head_dim = query.shape
    if seen is None:
        seen = _seen(num_queries, k.shape[1], None, k.device)
    q = (
        (query * layer.scale).transpose(0, 1).reshape(layer.num_kv_heads, -1, head_dim)
    )  # [kv_heads, group * queries, …]
    scores = layer.capped(torch.bmm(q, k.transpose(1, 2))).view(num_heads, num_queries, -1)
    weights = torch.softmax(scores.masked_fill_(~seen, -torch.inf), -1, dtype=torch.float32).to(v.dtype)
    out = torch.bmm(weights.view(layer.num_kv_heads, -1, k.shape[1]), v)
    return out.view(num_heads, num_queries, head_dim).transpose(0, 1)


def _seen(num_queries: int, context_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[num_queries, context_len] bool: what each of the last `num_queries` tokens of a context attends to."""
    before = context_len - num_queries
    seen = torch.ones(num_queries, context_len, dtype=torch.bool, device=device).tril(before)
    return seen if window is None else seen.triu(before - window + 1)
