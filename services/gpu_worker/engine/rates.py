"""Measured speeds, for the scheduler's cost model."""

from dataclasses import dataclass
from math import sqrt

_WEIGHT = 0.1
"""Of the newest step in the moving averages: about the last twenty steps count."""
_SPREAD = 0.1
"""Least standard deviation of the batch size, as a share of its mean, from which a slope is told."""


@dataclass(slots=True)
class DecodeTime:
    """Seconds of a decode step as a line over its rows, by least squares in which recent steps weigh more.

    A step reads all weights whatever its batch, so its time is far from proportional to the rows. While the batch does
    not change, the slope that was found last stands.
    """

    slope: float = 0.0
    _weight: float = 0.0
    _rows: float = 0.0
    _squares: float = 0.0
    _seconds: float = 0.0
    _products: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A step with this many rows took this long."""
        keep = 1 - _WEIGHT
        self._weight = keep * self._weight + 1
        self._rows = keep * self._rows + rows
        self._squares = keep * self._squares + rows * rows
        self._seconds = keep * self._seconds + seconds
        self._products = keep * self._products + rows * seconds
        self._fit()

    def _fit(self) -> None:
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - rows * rows
        if variance > 0 and sqrt(variance) >= _SPREAD * rows:
            self.slope = (self._products / self._weight - rows * seconds) / variance
        self.slope = min(max(self.slope, 0.0), seconds / rows)

    @property
    def base(self) -> float:
        """Seconds of a step whatever its rows; 0 if no step was measured."""
        return (self._seconds - self.slope * self._rows) / self._weight if self._weight else 0.0

    def of(self, rows: int) -> float:
        """Seconds of a step with this many rows."""
        return self.base + self.slope * rows


class Rates:
    """Moving averages. What a step takes beyond its decode rows counts for prefill."""

    def __init__(self) -> None:
        self._prefill = 0.0
        self._decode = DecodeTime()
        self._copied = 0.0
        self._copy_seconds = 0.0

    def record(self, num_prefill: int, num_decode: int, seconds: float) -> None:
        """A step computed these tokens in this time."""
        if seconds <= 0 or not (num_prefill or num_decode):
            return
        if not num_prefill:
            self._decode.add(num_decode, seconds)
            return
        for_decode = min(self._decode.of(num_decode) if num_decode else 0.0, seconds / 2)
        self._prefill = _average(self._prefill, num_prefill / (seconds - for_decode))

    def record_copy(self, num_bytes: int, seconds: float) -> None:
        """Blocks of this size in the KV cache went to or came from the host pool in this time.

        Large copies weigh more than small ones: the model asks what a swap of many blocks costs.
        """
        if num_bytes and seconds > 0:
            self._copied = (1 - _WEIGHT) * self._copied + num_bytes
            self._copy_seconds = (1 - _WEIGHT) * self._copy_seconds + seconds

    @property
    def values(self) -> tuple[float, float, float, float]:
        """Prefill tokens/s; seconds of a decode step without its rows, and of each row; copy bytes/s (of the KV cache,
        whatever the host pool stores). 0: not known."""
        copy = self._copied / self._copy_seconds if self._copy_seconds else 0.0
        return round(self._prefill, 1), round(self._decode.base, 7), round(self._decode.slope, 7), round(copy, 1)


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + _WEIGHT * (new - old)
