"""What is measured while a simulation runs: samples with weights, levels over time, and a few points to draw."""

from array import array
from dataclasses import dataclass

MAX_POINTS = 2000
"""Points of a curve; with more, every second one goes."""
FIRST_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a duration, in seconds. Percentiles are the smallest sample that so many samples do not exceed."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Samples:
    """Values, each so many times."""

    def __init__(self) -> None:
        self._values, self._weights = array("d"), array("q")

    def add(self, value: float, weight: int = 1) -> None:
        self._values.append(value)
        self._weights.append(weight)

    def sorted(self) -> list[tuple[float, int]]:
        """(value, number of samples up to and including it), by value."""
        ordered, total = [], 0
        for value, weight in sorted(zip(self._values, self._weights, strict=True)):
            total += weight
            ordered.append((value, total))
        return ordered

    def distribution(self) -> Distribution:
        ordered = self.sorted()
        if not ordered:
            return Distribution()
        count = ordered[-1][1]
        weighted = sum(value * weight for value, weight in zip(self._values, self._weights, strict=True))
        p50, p90, p99 = (_percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return Distribution(count, weighted / count, p50, p90, p99, ordered[-1][0])


def _percentile(ordered: list[tuple[float, int]], share: float) -> float:
    needed = share * ordered[-1][1]
    return next(value for value, total in ordered if total >= needed)


class Level:
    """A number that holds until it is set again; its integral and peak."""

    def __init__(self) -> None:
        self.integral = 0.0
        self.peak = 0.0
        self._value, self._since = 0.0, 0.0

    def set(self, now: float, value: float) -> None:
        self.integral += self._value * (now - self._since)
        self._value, self._since = value, now
        self.peak = max(self.peak, value)


@dataclass(frozen=True, slots=True)
class Point:
    """The pool at one time."""

    at_s: float
    num_waiting: int
    num_running: int
    used_blocks: int
    cached_blocks: int


class Curve:
    """Points at equal intervals, few enough to draw, however long the simulation runs."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._interval_s = FIRST_INTERVAL_S
        self._next = 0.0

    def wants(self, now: float) -> bool:
        return now >= self._next

    def add(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            del self.points[1::2]
            self._interval_s *= 2
        self._next = point.at_s + self._interval_s
