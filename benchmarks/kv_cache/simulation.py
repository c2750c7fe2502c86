"""The simulations that say what a mechanism is worth: two machines, and one way to run a load on them.

The core that decides is the real one; only the time that a step takes comes from a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Value
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.simulator import LatencyModel, Report, Trace, WorkerChange, WorkerSpec, simulate
from services.scheduler.simulator.run import TickObserver

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a worker is, and what a block of its model weighs."""

    name: str
    latency: LatencyModel
    block_bytes: int


FAST = Machine(
    "fast", LatencyModel(base_s=0.005, decode_row_s=0.0001, prefill_token_s=0.00005, context_token_s=0.0), 2**21
)
"""Never the reason why a request waits: what is shown is memory."""
CPU = Machine("CPU", LatencyModel(), 368_640)
"""A 135M model on two cores, as measured; blocks of 16 tokens in bfloat16."""
ACCELERATOR = Machine(
    "accelerator",
    LatencyModel(base_s=0.005, decode_row_s=2e-5, prefill_token_s=5e-5, context_token_s=1e-8, copy_bytes_per_s=25e9),
    2**21,
)
"""An 8B model, assumed, not measured: 5 ms a step, 20,000 prefill tokens/s, copies at the speed of PCIe 4."""


def run(
    trace: Trace,
    machine: Machine,
    *,
    num_blocks: int,
    num_cpu_blocks: int = 0,
    num_workers: int = 1,
    changes: Sequence[WorkerChange] = (),
    on_tick: TickObserver | None = None,
    **options: Any,
) -> Report:
    """The load on workers of this kind, named `worker-0` and so on. `num_blocks` are per worker, `options` those of
    `SchedulerConfig`."""
    limits: dict[str, Any] = {
        "max_model_len": 8192,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 512,
    }
    config = SchedulerConfig(**(limits | options))
    workers = [
        WorkerSpec(
            name=f"worker-{number}",
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_bytes=machine.block_bytes,
        )
        for number in range(num_workers)
    ]
    return simulate(config, workers, trace, machine.latency, changes=changes, on_tick=on_tick)


def speed(report: Report) -> dict[str, Value]:
    """Columns that every mechanism is judged by."""
    return {
        "TTFT mean s": report.ttft.mean,
        "TTFT p99 s": report.ttft.p99,
        "output tokens/s": report.output_tokens_per_s,
    }
