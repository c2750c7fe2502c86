"""`pagewire simulate`: options in, the scheduler's simulator, figures out."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from services.cli.settings import Settings
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.settings import Settings as SchedulerSettings
from services.scheduler.simulator import LatencyModel, Trace, WorkerSpec, simulate
from services.scheduler.simulator.generators import generate
from services.scheduler.simulator.plots import write_plots
from services.scheduler.simulator.pool import parse_change
from services.scheduler.simulator.recorded_traces import read_recording
from services.scheduler.simulator.trace_files import read_lines
from shared.errors import ConfigError

NUM_BLOCKS = 4096
"""KV blocks per worker, if none are given."""
TOKEN_BYTES = 2 * 2 * 30 * 3 * 64
"""KV of one token: keys and values in bfloat16, 30 layers of 3 heads with 64 dimensions (SmolLM2-135M)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What comes in, and what happens meanwhile."""

    trace: str
    requests: int | None = None
    rate: float | None = None
    seed: int | None = None
    latency: Sequence[str] = ()
    """`base_s=0.004`, …"""
    changes: Sequence[str] = ()
    """`12.5:kill:worker-1`, …"""


def run(settings: Settings, load: Load, *, as_json: bool, plots: Path | None) -> None:
    """Simulate, print, draw.

    Raises:
        ConfigError: an option, trace or file that it cannot work with.
    """
    trace = read_trace(load)
    config = core_config(settings, settings.max_model_len or max(request.max_total_tokens for request in trace))
    workers = [
        WorkerSpec(
            name=f"worker-{index}",
            num_blocks=settings.num_blocks or NUM_BLOCKS,
            num_cpu_blocks=settings.num_cpu_blocks or 0,
            block_bytes=settings.block_size * TOKEN_BYTES,
        )
        for index in range(settings.workers)
    ]
    latency, changes = read_latency(load.latency), [parse_change(text) for text in load.changes]
    began = time.perf_counter()
    report = simulate(config, workers, trace, latency, changes=changes)
    took = time.perf_counter() - began
    print(json.dumps(report.to_dict()) if as_json else "\n".join(report.lines()))
    if plots is not None:
        for path in write_plots(report, plots):
            print(path, file=sys.stderr)
    print(f"simulated {report.duration_s:.1f} s and {report.num_steps} steps in {took:.1f} s", file=sys.stderr)


def read_trace(load: Load) -> Trace:
    """A generator's trace, that of a file, or that of a recording."""
    path = Path(load.trace)
    if path.is_dir():
        return read_recording(path)[: load.requests]
    if path.is_file() or path.suffix in (".jsonl", ".json"):
        return read_lines(path)[: load.requests]
    return generate(load.trace, requests=load.requests, rate=load.rate, seed=load.seed)


def read_latency(words: Sequence[str]) -> LatencyModel:
    """The default model with these coefficients changed."""
    known = {field.name for field in fields(LatencyModel)}
    given = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in known:
            raise ConfigError(f"latency has no {name!r}; it has {', '.join(sorted(known))}")
        try:
            given[name] = float(value)
        except ValueError:
            raise ConfigError(f"latency {name}: {value!r} is not a number") from None
    return LatencyModel(**given)


def core_config(settings: Settings, max_model_len: int) -> SchedulerConfig:
    """As a scheduler with these settings would have it."""
    own = dict(settings)
    names = [field.name for field in fields(SchedulerConfig) if own.get(field.name) is not None]
    return SchedulerSettings(**{name: own[name] for name in names}).core_config(max_model_len)
