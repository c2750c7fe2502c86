"""How long requests waited before they were first admitted, by class of priority."""

from collections.abc import Iterable

from shared.histogram import QUEUE_TIME_BOUNDS_S, Histogram
from shared.messages import QueueTimes


class QueueTimeCounts:
    """Since this leader leads: what an earlier one counted is not in a snapshot, and metrics stand for resets."""

    def __init__(self) -> None:
        self._by_class = {name: Histogram(QUEUE_TIME_BOUNDS_S) for name in ("high", "normal", "low")}

    def count(self, waits: Iterable[tuple[int, float]]) -> None:
        """(priority, seconds) of first admissions."""
        for priority, seconds in waits:
            self._by_class[class_of(priority)].observe(seconds)

    def told(self) -> tuple[QueueTimes, ...]:
        """For the stats: classes in which nobody was admitted are left out."""
        return tuple(
            QueueTimes(name, tuple(times.counts), times.total)
            for name, times in self._by_class.items()
            if times.num_values
        )


def class_of(priority: int) -> str:
    """Few classes for all priorities: a label must not have thousands of values."""
    return "high" if priority < 0 else "low" if priority > 0 else "normal"
