"""From the simulator: how much of the memory holds tokens, and which eviction keeps the right blocks."""

from collections.abc import Callable
from typing import Any

from benchmarks.kv_cache.simulation import BLOCK_SIZE, FAST, run
from benchmarks.kv_cache.traces import chats, scans, system_prompts
from benchmarks.report import Value
from services.scheduler.core.evictable import Eviction
from services.scheduler.simulator import Report, Trace
from services.scheduler.simulator.generators import poisson

MAX_MODEL_LEN = 2048
WASTE = "slots without a token, of those given out %"


def _run(trace: Trace, num_blocks: int, **options: Any) -> Report:
    limits: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 512, "max_num_batched_tokens": 2048}
    return run(trace, FAST, num_blocks=num_blocks, **(limits | options))


# ---------------------------------------------------------------- memory


def measure_memory(num_blocks: int, num_requests: int) -> list[dict[str, Value]]:
    """The same memory and load, paged and as one place of the longest possible request per request.

    Every request could be as long as `MAX_MODEL_LEN`; drawn are prompts around 300 and outputs around 200 tokens.
    """
    trace = poisson(requests=num_requests, rate=1000.0, prompt=300, output=200, seed=3)
    report = _run(trace, num_blocks, enable_prefix_caching=False)
    num_slots = num_blocks * BLOCK_SIZE
    held = report.used_share * num_slots * (1 - report.waste_share) / report.running_mean
    preallocated = num_slots // MAX_MODEL_LEN
    return [
        {
            "memory": "paged",
            "requests at a time": report.running_mean,
            WASTE: 100 * report.waste_share,
            "tokens a request": held,
            "requests/s": report.requests_per_s,
        },
        {
            "memory": f"preallocated, {MAX_MODEL_LEN} tokens each",
            "requests at a time": float(preallocated),
            WASTE: 100 * (1 - held / MAX_MODEL_LEN),
            "tokens a request": held,
            "requests/s": _with_rows(trace, num_blocks, preallocated).requests_per_s,
        },
    ]


def _with_rows(trace: Trace, num_blocks: int, num_rows: int) -> Report:
    return _run(trace, num_blocks, enable_prefix_caching=False, max_num_seqs=num_rows)


# ---------------------------------------------------------------- hits

TRACES: dict[str, Callable[[], Trace]] = {
    "chat, many turns": chats,
    "shared system prompts": system_prompts,
    "documents and scans": scans,
}


def measure_hits(num_blocks: int) -> list[dict[str, Value]]:
    """Share of the tokens at admission that were cached, by trace and eviction; `unlimited`: the most there is."""
    rows: list[dict[str, Value]] = []
    for name, make in TRACES.items():
        trace = make()
        row: dict[str, Value] = {"trace": name}
        for eviction in Eviction:
            row[f"{eviction} %"] = 100 * _run(trace, num_blocks, eviction=eviction).hit_rate
        row["unlimited %"] = 100 * _run(trace, 50 * num_blocks).hit_rate
        rows.append(row)
    return rows
