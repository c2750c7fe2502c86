"""Stop strings in a text that arrives in pieces: which one ends first, and how much text must wait."""

from array import array
from typing import NamedTuple


class _Pattern:
    """One stop string with its prefix function (Knuth, Morris and Pratt, 1977).

    `borders[i]` is the length of the longest proper prefix that is also a suffix of the first `i + 1` characters.
    """

    __slots__ = ("borders", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.borders = array("H", bytes(2 * len(text)))
        matched = 0
        for position in range(1, len(text)):
            while matched and text[position] != text[matched]:
                matched = self.borders[matched - 1]
            matched += text[position] == text[matched]
            self.borders[position] = matched

    def advance(self, matched: int, text: str, honoured: bool) -> tuple[int, int]:
        """Read on with `matched` characters of the pattern seen at the end of the text before.

        Returns (matched after `text`, end of the first complete match in `text` or -1). A match that is not honoured
        is passed over.
        """
        pattern, position = self.text, 0
        while position < len(text):
            if not matched:
                position = text.find(pattern[0], position)
                if position < 0:
                    break
            while matched and text[position] != pattern[matched]:
                matched = self.borders[matched - 1]
            matched += text[position] == pattern[matched]
            position += 1
            if matched == len(pattern):
                if honoured:
                    return matched, position
                matched = self.borders[matched - 1]
        return matched, -1


class StopStrings:
    """The stop strings of one request, prepared once; shared by all streams over it."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.patterns = tuple(_Pattern(stop) for stop in stops)

    def start(self) -> "StopScanner":
        return StopScanner(self.patterns)


class Scan(NamedTuple):
    """Text that may be shown, and the stop string that ends it, if one completed."""

    text: str
    stop: str | None = None


class StopScanner:
    """The state of one stream. Holds back only the longest end of the text that some stop string begins with."""

    def __init__(self, patterns: tuple[_Pattern, ...]) -> None:
        self._patterns = patterns
        self._matched = [0] * len(patterns)
        self._held = ""

    def push(self, text: str, honoured: bool = True) -> Scan:
        """Add `text`. Of the stop strings that complete in it, the one that ends first counts; of those that end
        together, the longest. With `honoured` false, none does, but one that only begins in `text` may later."""
        ends = []
        for index, pattern in enumerate(self._patterns):
            self._matched[index], end = pattern.advance(self._matched[index], text, honoured)
            if end >= 0:
                ends.append((end, -len(pattern.text), pattern.text))
        known = self._held + text
        if ends:
            end, negative_length, stop = min(ends)
            self._held = ""
            return Scan(known[: len(known) - len(text) + end + negative_length], stop)
        shown = len(known) - max(self._matched, default=0)
        self._held = known[shown:]
        return Scan(known[:shown])

    def flush(self) -> str:
        """The text that was held, now that none follows."""
        held, self._held = self._held, ""
        return held
