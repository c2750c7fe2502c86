"""Measured speeds, for the scheduler's cost model."""

_WEIGHT = 0.1
"""Of the newest step in the moving average: about the last twenty steps count."""


class Rates:
    """Moving averages of tokens per second. A mixed step counts for decode at the known rate, the rest for prefill."""

    def __init__(self) -> None:
        self._prefill = 0.0
        self._decode = 0.0
        self._copied = 0.0
        self._copy_seconds = 0.0

    def record(self, num_prefill: int, num_decode: int, seconds: float) -> None:
        """A step computed these tokens in this time."""
        if seconds <= 0 or not (num_prefill or num_decode):
            return
        if not num_prefill:
            self._decode = _average(self._decode, num_decode / seconds)
            return
        for_decode = min(num_decode / self._decode if self._decode else 0.0, seconds / 2)
        self._prefill = _average(self._prefill, num_prefill / (seconds - for_decode))

    def record_copy(self, num_bytes: int, seconds: float) -> None:
        """Blocks of this size in the KV cache went to or came from the host pool in this time.

        Large copies weigh more than small ones: the model asks what a swap of many blocks costs.
        """
        if num_bytes and seconds > 0:
            self._copied = (1 - _WEIGHT) * self._copied + num_bytes
            self._copy_seconds = (1 - _WEIGHT) * self._copy_seconds + seconds

    @property
    def values(self) -> tuple[float, float, float]:
        """Prefill tokens/s, decode tokens/s, copy bytes/s (of the KV cache, whatever the host pool stores)."""
        copy = self._copied / self._copy_seconds if self._copy_seconds else 0.0
        return round(self._prefill, 1), round(self._decode, 1), round(copy, 1)


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + _WEIGHT * (new - old)
