"""Measured speeds, for the scheduler's cost model."""

_WEIGHT = 0.1
"""Of the newest step in the moving average: about the last twenty steps count."""


class Rates:
    """Moving averages of tokens per second. A mixed step counts for decode at the known rate, the rest for prefill."""

    def __init__(self) -> None:
        self._prefill = 0.0
        self._decode = 0.0

    def record(self, num_prefill: int, num_decode: int, seconds: float) -> None:
        """A step computed these tokens in this time."""
        if seconds <= 0:
            return
        if not num_prefill:
            self._decode = _average(self._decode, num_decode / seconds)
            return
        for_decode = min(num_decode / self._decode if self._decode else 0.0, seconds / 2)
        self._prefill = _average(self._prefill, num_prefill / (seconds - for_decode))

    @property
    def values(self) -> tuple[float, float, float]:
        """Prefill tokens/s, decode tokens/s, copy bytes/s (nothing is copied yet)."""
        return round(self._prefill, 1), round(self._decode, 1), 0.0


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + _WEIGHT * (new - old)
