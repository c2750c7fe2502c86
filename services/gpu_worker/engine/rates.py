"""Measured speeds, for the scheduler's cost model."""

from dataclasses import dataclass
from math import sqrt

_WEIGHT = 0.1
"""Of the newest step in the moving averages: about the last twenty steps count."""
_SPREAD = 0.1
"""Least standard deviation of the batch size, as a share of its mean, from which a slope is told."""
_SPREAD_TOKENS = 256
"""Least standard deviation of the context of chunks from which a slope is told: below, noise is more than it."""
_LEAST_BASE = 0.1
"""Of the seconds of chunks: at least so much is not due to their context."""


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


@dataclass(slots=True)
class PrefillTime:
    """Seconds of a step's chunks: so much per token, and so much per token that it attends to, by least squares in
    which recent and large steps weigh more.

    Late chunks of a long prompt take far longer than its first one. While contexts do not differ by much, what they
    cost is told apart from nothing, and the slope that was found last stands.
    """

    slope: float = 0.0
    """Seconds per pair of a token and one that it attends to."""
    _squares: float = 0.0
    _products: float = 0.0
    _pair_squares: float = 0.0
    _token_seconds: float = 0.0
    _pair_seconds: float = 0.0

    def add(self, tokens: int, pairs: int, seconds: float) -> None:
        """So many tokens of chunks, which attend to `pairs` in all (at least to themselves), took this long."""
        keep = 1 - _WEIGHT
        self._squares = keep * self._squares + tokens * tokens
        self._products = keep * self._products + tokens * pairs
        self._pair_squares = keep * self._pair_squares + pairs * pairs
        self._token_seconds = keep * self._token_seconds + tokens * seconds
        self._pair_seconds = keep * self._pair_seconds + pairs * seconds
        self._fit()

    def _fit(self) -> None:
        context = self._products / self._squares
        variance = self._pair_squares / self._squares - context * context
        if variance >= _SPREAD_TOKENS**2:
            along = self._pair_seconds / self._squares - context * self._token_seconds / self._squares
            self.slope = along / variance
        most = (1 - _LEAST_BASE) * self._token_seconds / self._products
        self.slope = min(max(self.slope, 0.0), most)

    @property
    def base(self) -> float:
        """Seconds per token that attends to nothing; 0 if no chunk was measured."""
        return (self._token_seconds - self.slope * self._products) / self._squares if self._squares else 0.0


class Rates:
    """Moving averages. What a step takes beyond its decode rows counts for prefill."""

    def __init__(self) -> None:
        self._prefill = PrefillTime()
        self._decode = DecodeTime()
        self._copied = 0.0
        self._copy_seconds = 0.0

    def record(self, num_prefill: int, num_decode: int, seconds: float, num_pairs: int = 0) -> None:
        """A step computed these tokens in this time; those of chunks attend to `num_pairs` tokens in all."""
        if seconds <= 0 or not (num_prefill or num_decode):
            return
        if not num_prefill:
            self._decode.add(num_decode, seconds)
            return
        for_decode = min(self._decode.of(num_decode) if num_decode else 0.0, seconds / 2)
        self._prefill.add(num_prefill, max(num_pairs, num_prefill), seconds - for_decode)

    def record_copy(self, num_bytes: int, seconds: float) -> None:
        """Blocks of this size in the KV cache went to or came from the host pool in this time.

        Large copies weigh more than small ones: the model asks what a swap of many blocks costs.
        """
        if num_bytes and seconds > 0:
            self._copied = (1 - _WEIGHT) * self._copied + num_bytes
            self._copy_seconds = (1 - _WEIGHT) * self._copy_seconds + seconds

    @property
    def values(self) -> tuple[float, float, float, float, float]:
        """Prefill tokens/s without context; seconds of a decode step without its rows, and of each row; copy bytes/s
        (of the KV cache, whatever the host pool stores); seconds of prefill per token and context token. 0: not known.
        """
        copy = self._copied / self._copy_seconds if self._copy_seconds else 0.0
        prefill = 1 / self._prefill.base if self._prefill.base else 0.0
        decode = self._decode
        return (
            round(prefill, 1),
            round(decode.base, 7),
            round(decode.slope, 7),
            round(copy, 1),
            round(self._prefill.slope, 12),
        )
