"""With the real model: what a block costs to move, to compute again and to store as int8, and what int8 does to texts.

The text is text.txt, from books in the public domain (Lincoln, Austen, Melville, Carroll).
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from benchmarks.kv_cache.in_process import BLOCK_SIZE, served_dtype
from benchmarks.report import Value
from kernels.paged_attention.api import prepare
from services.gpu_worker.cache.host_pool import HostPool, allocate_pool, pool_bytes_per_block
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.models.model import ForwardInputs, Model
from services.scheduler.core.cost_model import swap_is_cheaper
from services.scheduler.core.rates import Rates

IntArray = npt.NDArray[np.int64]
TEXT = Path(__file__).with_name("text.txt")
SWAPS = {"swap": "auto", "swap, int8": "int8"}
"""Kinds of host pool, and their dtype."""
MOST_RECKONED = 8192
"""Tokens."""


def tokens_of(folder: Path) -> list[int]:
    """The text as the model reads it."""
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids)


def num_blocks_of(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)


class Bench:
    """A model and a cache in which request k has the blocks from `k * blocks_each` on."""

    def __init__(
        self, model: Model, *, num_requests: int, max_tokens: int, kv_dtype: torch.dtype | None = None
    ) -> None:
        """`kv_dtype`: of the cache; the model's if absent."""
        self.model = model
        self.blocks_each = num_blocks_of(max_tokens)
        num_blocks = num_requests * self.blocks_each
        self.cache = KVCache.allocate(model.config, num_blocks, BLOCK_SIZE, kv_dtype or model.dtype, model.device)
        self.cache.data.zero_()

    def forward(self, request: int, tokens: list[int], start: int, *, all_logits: bool) -> torch.Tensor:
        """Compute `tokens[start:]` behind the KV of those before; the logits of all of them, or of the last."""
        positions = torch.arange(start, len(tokens))
        first = request * self.blocks_each
        table = torch.arange(first, first + self.blocks_each, dtype=torch.int32)[None]
        num_new = len(tokens) - start
        inputs = ForwardInputs(
            token_ids=torch.tensor(tokens[start:]),
            positions=positions,
            slot_mapping=first * BLOCK_SIZE + positions,
            attention=prepare(np.array([num_new]), np.array([len(tokens)]), table, self.cache.layer(0)[0]),
            sample_at=None if all_logits else torch.tensor([num_new - 1]),
        )
        return self.model.forward(inputs, self.cache)

    def pairs(self, request: int, num_tokens: int) -> IntArray:
        """The request's blocks and as many blocks of a pool, from 0 on."""
        blocks = np.arange(num_blocks_of(num_tokens))
        return np.column_stack((request * self.blocks_each + blocks, blocks))


# ---------------------------------------------------------------- swap or recompute


def measure_swap(model: Model, tokens: list[int], lengths: tuple[int, ...], num_times: int) -> list[dict[str, Value]]:
    """Per context length: to compute it again, or to copy its blocks out and back in; medians in ms."""
    bench = Bench(model, num_requests=1, max_tokens=max(lengths), kv_dtype=served_dtype(model))
    block_bytes = bench.cache.bytes_per_block
    pools = {name: allocate_pool(bench.cache, bench.blocks_each, dtype) for name, dtype in SWAPS.items()}
    rows: list[dict[str, Value]] = []
    for length in lengths:
        some = tokens[:length]
        row: dict[str, Value] = {"tokens": float(length), "KV kB": num_blocks_of(length) * block_bytes / 1e3}
        row["recompute ms"] = _median_ms(partial(bench.forward, 0, some, 0, all_logits=False), num_times)
        for name, pool in pools.items():
            row[f"{name} ms"] = _median_ms(partial(_swap, bench, pool, length), num_times)
        rows.append(row)
    return rows


def _swap(bench: Bench, pool: HostPool, num_tokens: int) -> None:
    pairs = bench.pairs(0, num_tokens)
    pool.store(bench.cache, pairs)
    pool.load(bench.cache, pairs[:, ::-1])


def _median_ms(call: Callable[[], object], num_times: int) -> float:
    call()
    seconds = []
    for _ in range(num_times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def break_evens(rows: list[dict[str, Value]]) -> list[dict[str, Value]]:
    """Per kind of host pool: from how many tokens on a swap is cheaper, as measured and as the scheduler reckons.

    The scheduler's rates are those of the longest context in `rows`. Infinite if a swap never is.
    """
    num_tokens, recompute_ms, num_kb = (_number(rows[-1], name) for name in ("tokens", "recompute ms", "KV kB"))
    block_bytes = round(1e3 * num_kb / num_blocks_of(int(num_tokens)))
    prefill = 1e3 * num_tokens / recompute_ms
    found: list[dict[str, Value]] = []
    for name in SWAPS:
        rates = Rates(prefill=prefill, copy=2e6 * num_kb / _number(rows[-1], f"{name} ms"))
        found.append(
            {
                "host pool": name,
                "swap is faster from tokens": break_even(rows, name),
                "by the cost model": reckoned_break_even(rates, block_bytes),
                "prefill tokens/s": prefill,
                "copies MB/s": rates.copy / 1e6,
                "recompute is faster below MB/s": 2 * block_bytes / BLOCK_SIZE * prefill / 1e6,
            }
        )
    return found


def break_even(rows: list[dict[str, Value]], name: str) -> float:
    """The fewest tokens, of those measured, from which on the swap is faster; infinite if it never is."""
    wins = math.inf
    for row in reversed(rows):
        if _number(row, f"{name} ms") >= _number(row, "recompute ms"):
            break
        wins = _number(row, "tokens")
    return wins


def reckoned_break_even(rates: Rates, block_bytes: int) -> float:
    """The fewest tokens from which on the scheduler's cost model swaps; infinite if it never does."""
    wins = math.inf
    for num_tokens in range(MOST_RECKONED, 0, -1):
        if not swap_is_cheaper(
            num_tokens=num_tokens, num_blocks=num_blocks_of(num_tokens), block_bytes=block_bytes, rates=rates
        ):
            break
        wins = float(num_tokens)
    return wins


def _number(row: dict[str, Value], name: str) -> float:
    return float(row[name] or 0)


# ---------------------------------------------------------------- int8


def measure_codec(model: Model, tokens: list[int], segment: int) -> dict[str, Value]:
    """Segments of the text: the second half of each is read behind the exact KV of the first half, then behind int8."""
    num_segments = len(tokens) // segment
    bench = Bench(model, num_requests=num_segments, max_tokens=segment, kv_dtype=served_dtype(model))
    pool = allocate_pool(bench.cache, bench.blocks_each, "int8")
    half = segment // 2
    exact, coded, errors, norms = 0.0, 0.0, 0.0, 0.0
    for index in range(num_segments):
        part = tokens[index * segment : (index + 1) * segment]
        bench.forward(index, part[:half], 0, all_logits=False)
        pairs = bench.pairs(index, half)
        before = bench.cache.data[pairs[0, 0] : pairs[-1, 0] + 1].clone()
        exact += _nll(bench.forward(index, part, half, all_logits=True), part[half:])
        pool.store(bench.cache, pairs)
        pool.load(bench.cache, pairs[:, ::-1])
        after = bench.cache.data[pairs[0, 0] : pairs[-1, 0] + 1]
        errors += float((after.float() - before.float()).square().sum())
        norms += float(before.float().square().sum())
        coded += _nll(bench.forward(index, part, half, all_logits=True), part[half:])
    num_predicted = num_segments * (segment - half - 1)
    config, dtype = model.config, bench.cache.data.dtype
    plain, packed = (pool_bytes_per_block(config, BLOCK_SIZE, dtype, name) for name in ("auto", "int8"))
    return {
        "cache dtype": str(dtype).removeprefix("torch."),
        "ratio": plain / packed,
        "relative error %": 100 * math.sqrt(errors / norms),
        "perplexity, exact": math.exp(exact / num_predicted),
        "perplexity, int8": math.exp(coded / num_predicted),
        "change %": 100 * (math.exp((coded - exact) / num_predicted) - 1),
        "tokens predicted": float(num_predicted),
    }


def _nll(logits: torch.Tensor, tokens: list[int]) -> float:
    """Sum over the tokens after the first of how unlikely each was."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="sum"))
