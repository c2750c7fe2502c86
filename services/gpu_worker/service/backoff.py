"""Waiting between tries."""

from collections.abc import Iterator

FIRST_S = 0.02
LONGEST_S = 1.0


def delays() -> Iterator[float]:
    """Seconds to wait after the first, second, … failure: doubling, bounded."""
    delay = FIRST_S
    while True:
        yield delay
        delay = min(2 * delay, LONGEST_S)
