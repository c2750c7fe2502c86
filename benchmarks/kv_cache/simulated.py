"""From the simulator: how much of the memory holds tokens, and which eviction keeps the right blocks."""

from collections.abc import Callable
from dataclasses import replace

from benchmarks.report import Value
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.evictable import Eviction
from services.scheduler.simulator import LatencyModel, Piece, Report, Trace, TraceRequest, WorkerSpec, simulate
from services.scheduler.simulator.generators import chat, long_document, poisson
from services.scheduler.simulator.trace import Text

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
FAST = LatencyModel(base_s=0.005, decode_row_s=0.0001, prefill_token_s=0.00005, context_token_s=0.0)
"""A worker that is never the reason why a request waits: what is shown is memory."""


def _run(trace: Trace, num_blocks: int, **options: object) -> Report:
    limits: dict[str, object] = {
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 512,
        "max_num_batched_tokens": 2048,
    }
    config = SchedulerConfig(**(limits | options))  # type: ignore[arg-type]
    return simulate(config, [WorkerSpec(name="w", num_blocks=num_blocks)], trace, FAST)


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
            "slots without a token, of those given out %": 100 * report.waste_share,
            "tokens a request": held,
            "requests/s": report.requests_per_s,
        },
        {
            "memory": f"preallocated, {MAX_MODEL_LEN} tokens each",
            "requests at a time": float(preallocated),
            "slots without a token, of those given out %": 100 * (1 - held / MAX_MODEL_LEN),
            "tokens a request": held,
            "requests/s": _with_rows(trace, num_blocks, preallocated).requests_per_s,
        },
    ]


def _with_rows(trace: Trace, num_blocks: int, num_rows: int) -> Report:
    return _run(trace, num_blocks, enable_prefix_caching=False, max_num_seqs=num_rows)


# ---------------------------------------------------------------- hits


def chats() -> Trace:
    """Conversations of six turns behind one of four system prompts: a turn hits what the turns before it left."""
    return chat(requests=900, rate=1.5, turns=6, systems=4, system=400, prompt=60, output=120, think=4.0, seed=5)


def system_prompts() -> Trace:
    """Single questions behind one of forty system prompts, a few of them far more popular than the others."""
    favoured = chat(requests=500, rate=12.0, turns=1, systems=4, system=600, prompt=80, output=60, seed=6)
    others = chat(requests=400, rate=10.0, turns=1, systems=36, system=600, prompt=80, output=60, seed=7)
    return merged(favoured, others)


def scans() -> Trace:
    """Questions to a few documents, while others read long texts once: a scan pushes out what is used again."""
    asked = long_document(requests=400, rate=4.0, documents=8, document=1200, prompt=40, output=60, seed=8)
    read_once = poisson(requests=300, rate=3.0, prompt=1100, output=40, seed=9)
    return merged(asked, read_once)


TRACES: dict[str, Callable[[], Trace]] = {
    "chat, many turns": chats,
    "shared system prompts": system_prompts,
    "documents and scans": scans,
}


def merged(*traces: Trace) -> Trace:
    """Side by side, with names of their own; in the order of arrival, which lets `after` point back."""
    requests = [_renamed(request, f"{number}:") for number, trace in enumerate(traces) for request in trace]
    return sorted(requests, key=lambda request: request.arrival)


def _renamed(request: TraceRequest, prefix: str) -> TraceRequest:
    assert not request.after, "turns are not independent arrivals"
    prompt, output = (_renamed_pieces(text, prefix) for text in (request.prompt, request.output))
    return replace(request, request_id=prefix + request.request_id, prompt=prompt, output=output)


def _renamed_pieces(text: Text, prefix: str) -> tuple[Piece, ...]:
    assert isinstance(text, tuple)
    return tuple(Piece(prefix + piece.name, piece.length) for piece in text)


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
