"""What workers of a world say to have measured: it varies, and some of it they do not know."""

import zlib
from collections.abc import Sequence

BLOCK_BYTES = 64
PREFILL = (100.0, 400.0, 25.0, 0.0)
"""Tokens per second."""
DECODE_BASE_S = (0.0, 0.004, 0.03)
DECODE_ROW_S = (0.0, 0.001, 0.008)
NUM_READINGS = 3


def drawn_rates(number: int, copied_blocks: Sequence[int]) -> list[tuple[float, ...]]:
    """Readings that differ, spread evenly by `number`; `copied_blocks` per second are what copies may reach."""
    readings: list[tuple[float, ...]] = []
    for _ in range(NUM_READINGS):
        number = rest = zlib.crc32(number.to_bytes(4, "big"))
        reading = []
        for choices in (PREFILL, DECODE_BASE_S, DECODE_ROW_S, [BLOCK_BYTES * blocks for blocks in copied_blocks]):
            rest, index = divmod(rest, len(choices))
            reading.append(float(choices[index]))
        readings.append(tuple(reading))
    return readings
