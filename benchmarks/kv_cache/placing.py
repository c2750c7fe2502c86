"""From the simulator: what it is worth that a worker which has the beginning of a prompt is preferred."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from benchmarks.kv_cache.simulation import CPU, run, speed
from benchmarks.report import Value
from services.scheduler.core.placement import Placement
from services.scheduler.simulator import Trace
from services.scheduler.simulator.generators import chat

NUM_BLOCKS = 600
RATE = 0.08
"""Conversations per second and worker."""


def conversations(num_workers: int, requests: int) -> Trace:
    """Five turns each, behind one of twelve system prompts."""
    return chat(
        requests=requests,
        rate=RATE * num_workers,
        turns=5,
        systems=12,
        system=600,
        prompt=60,
        output=60,
        think=10.0,
        seed=5,
    )


@contextmanager
def by_load_only() -> Iterator[None]:
    """The core places as if no lane had anything cached. What a request finds where it comes is hit all the same."""
    with patch.object(Placement, "_with_hits", lambda self: []):
        yield


def measure_placement(requests_each: int) -> list[dict[str, Value]]:
    """`requests_each` per worker, on 2 and 4 workers."""
    rows: list[dict[str, Value]] = []
    for num_workers in (2, 4):
        trace = conversations(num_workers, requests_each * num_workers)
        reports = {"residency and load": run(trace, CPU, num_blocks=NUM_BLOCKS, num_workers=num_workers)}
        with by_load_only():
            reports["load only"] = run(trace, CPU, num_blocks=NUM_BLOCKS, num_workers=num_workers)
        for name, report in reports.items():
            hits = {"hits %": 100 * report.hit_rate, "workers busy %": 100 * report.busy_share}
            rows.append({"workers": str(num_workers), "placed by": name, **hits, **speed(report)})
    return rows
