"""Tokens of answered steps, kept as the arrays that came: nobody walks rows when a step arrives.

step base      │ row 0 │ row 1 │ … │ row width-1 │
step base + 1  │       │       │   │             │      one flat int32 array, `width` tokens per step;
…                                                        a row's tokens are one strided slice
"""

from array import array

from shared.packing import NO_TOKEN, unpack_int32

MAX_STEPS = 256
"""Steps kept before rows must be collected. At 1,024 rows that is 1 MB, and collecting costs under 3 µs per step."""


class TokenHistory:
    """Consecutive steps of one lane, from `base` on."""

    def __init__(self, width: int, base: int) -> None:
        self.base = base
        self._width = width
        self._padding = array("i", [NO_TOKEN]) * width
        self._tokens = array("i")

    @property
    def end(self) -> int:
        """The step that comes next."""
        return self.base + len(self._tokens) // self._width

    @property
    def is_full(self) -> bool:
        return len(self._tokens) >= MAX_STEPS * self._width

    def append(self, tokens: bytes) -> None:
        """The packed row array of step `end`, at most `width` rows."""
        values = unpack_int32(tokens)
        self._tokens.extend(values)
        self._tokens.extend(self._padding[len(values) :])

    def row(self, row: int, start: int, stop: int) -> "array[int]":
        """Tokens of `row` in the steps `start … stop - 1`."""
        offset = (start - self.base) * self._width
        return self._tokens[offset + row : (stop - self.base) * self._width : self._width]

    def clear(self) -> None:
        """Forget all steps; every row has been collected."""
        self.base = self.end
        self._tokens = array("i")
