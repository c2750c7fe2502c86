"""Counts of values by size, for metrics. Not thread-safe, and cheap: one binary search per observation."""

from bisect import bisect_left
from collections.abc import Sequence

QUEUE_TIME_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
STEP_TIME_BOUNDS_S = (0.0001, 0.0003, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class Histogram:
    """How many values were at most each of `bounds`, which rise; and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        """`counts` go on from here: one per bound and one for what is larger.

        Raises:
            ValueError: another number of them.
        """
        self.bounds = tuple(bounds)
        self.counts = list(counts) or [0] * (len(self.bounds) + 1)
        self.total = total
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError(f"{len(self.counts)} counts for {len(self.bounds)} bounds")

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times `value`."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """(bound as Prometheus writes it, values up to it)."""
        found, so_far = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            so_far += count
            found.append((_label(bound), so_far))
        return found


def _label(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(float(bound))
