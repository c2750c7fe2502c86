"""What a worker has measured of itself, and what follows from it for the size of a prefill chunk.

The core never measures: rates come in step results, so a replay sees the same ones.
"""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

MAX_PREFILL = 2**31 - 1
"""Tokens of a step; more than any budget."""


class Rates(NamedTuple):
    """Of one worker incarnation; 0 is unknown."""

    prefill: float = 0.0
    """Tokens per second."""
    decode: float = 0.0
    """Tokens per second, over all rows of its batch."""
    copy: float = 0.0
    """Bytes per second between KV cache and host pool."""


def newest_rates(known: Rates, told: Sequence[float]) -> Rates:
    """What a result tells, if it tells anything that makes sense. What it does not know stays as it was."""
    if len(told) == len(known) and all(isfinite(rate) and rate >= 0 for rate in told):
        return Rates(*(new or old for new, old in zip(told, known, strict=True)))
    return known


def prefill_tokens_within(itl_target_s: float, num_decode: int, rates: Rates) -> int | None:
    """Prefill tokens that fit a step beside `num_decode` decode rows if it shall take `itl_target_s` seconds.

    None if nothing bounds them: no target, nobody decodes, or the rates are not known yet.
    """
    if not (itl_target_s and num_decode and rates.prefill and rates.decode):
        return None
    fitting = (itl_target_s - num_decode / rates.decode) * rates.prefill
    return int(min(max(0.0, fitting), MAX_PREFILL))  # infinite, if a worker tells rates that no machine has
