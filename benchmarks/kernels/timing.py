"""Kernels against a limit of the machine, measured alternately: a shared machine has fast and slow phases."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.report import Bar, Value


class Limit(StrEnum):
    """What bounds a kernel."""

    READ = "read bandwidth"
    BF16 = "bf16 peak"
    INT8 = "int8 peak"


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size."""

    name: str
    run: Callable[[], object]
    amount: float
    """Bytes that it must read, or operations that it must do."""
    limit: Limit
    bar: float | None = None
    """Per cent of the limit that it has to reach."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians over the pairs."""

    ms: float
    rate: float
    """Of the kernel: bytes or operations per second."""
    share: float
    """Of the limit as it was measured right beside it, per cent."""


Probe = Callable[[], float]
"""Measures a limit now: bytes or operations per second."""


def measure(case: Case, probe: Probe, *, repeats: int, min_s: float) -> Timed:
    """Alternate the kernel, for at least `min_s` at a time, and the limit."""
    case.run()
    started = time.perf_counter()
    case.run()
    calls = max(1, round(min_s / max(time.perf_counter() - started, 1e-7)))
    seconds, shares = [], []
    for _ in range(repeats):
        before = probe()
        started = time.perf_counter()
        for _ in range(calls):
            case.run()
        seconds.append((time.perf_counter() - started) / calls)
        limit = (before + probe()) / 2
        shares.append(case.amount / seconds[-1] / limit)
    middle = statistics.median(seconds)
    return Timed(1e3 * middle, case.amount / middle, 100 * statistics.median(shares))


def row_of(case: Case, timed: Timed) -> dict[str, Value]:
    """A row of the table."""
    return {
        "kernel": case.name,
        "ms": timed.ms,
        "G/s": timed.rate / 1e9,
        "%": timed.share,
        "of": str(case.limit),
        "bar %": case.bar,
    }


def bar_of(case: Case, timed: Timed) -> Bar | None:
    """The bar that the case must keep, if there is one."""
    if case.bar is None:
        return None
    return Bar(f"{case.name}, of {case.limit}", timed.share, case.bar, "%", at_least=True)
