"""What the GPU can do, measured in the same run, and how long a launch takes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_ROUNDS = 20
_FLUSH_BYTES = 512 << 20
"""Written between rounds, so that no kernel finds its inputs in the L2 cache."""


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Limits of this device."""

    bytes_per_s: float
    """Read plus written by a large copy."""
    flops_per_s: float
    """Of a large bfloat16 product."""


class Stopwatch:
    """Times work on the current stream by events."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time of one call, with a cold L2 cache."""
        work()
        times = []
        for _ in range(_ROUNDS):
            self._flush.zero_()
            start, end = _event(), _event()
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return float(sorted(times)[_ROUNDS // 2])


def measure_peaks(watch: Stopwatch) -> Peaks:
    """A copy of 1 GiB and a product of 8,192 cubed."""
    source, target = (torch.empty(1 << 30, dtype=torch.int8, device="cuda") for _ in range(2))
    copying = watch.seconds(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    multiplying = watch.seconds(lambda: a @ a)
    return Peaks(2 * source.nbytes / copying, 2 * 8192**3 / multiplying)
