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
    decode_base_s: float = 0.0
    """Seconds of a decode step, whatever its rows."""
    decode_row_s: float = 0.0
    """Seconds that each row adds."""
    copy: float = 0.0
    """Bytes per second between KV cache and host pool."""

    def decode_s(self, num_rows: int) -> float:
        """Seconds of a decode step with this many rows; 0 if not known."""
        return self.decode_base_s + num_rows * self.decode_row_s

    def step_s(self, num_rows: int, num_prefill: int, num_bytes: int) -> float | None:
        """Seconds of a step that also prefills and copies; None if a rate is lacking."""
        decode_s = self.decode_s(max(1, num_rows))
        if not decode_s or (num_prefill and not self.prefill) or (num_bytes and not self.copy):
            return None
        return decode_s + (num_prefill and num_prefill / self.prefill) + (num_bytes and num_bytes / self.copy)


def newest_rates(known: Rates, told: Sequence[float]) -> Rates:
    """What a result tells, if it tells anything that makes sense. What it does not know stays as it was."""
    if len(told) == len(known) and all(isfinite(rate) and rate >= 0 for rate in told):
        new = Rates(*told)
        decode = new if new.decode_s(1) else known
        return Rates(new.prefill or known.prefill, decode.decode_base_s, decode.decode_row_s, new.copy or known.copy)
    return known


def prefill_tokens_within(itl_target_s: float, num_decode: int, rates: Rates) -> int | None:
    """Prefill tokens that fit a step beside `num_decode` decode rows if it shall take `itl_target_s` seconds.

    None if nothing bounds them: no target, nobody decodes, or the rates are not known yet.
    """
    if not (itl_target_s and num_decode and rates.prefill and rates.decode_s(num_decode)):
        return None
    fitting = (itl_target_s - rates.decode_s(num_decode)) * rates.prefill
    return int(min(max(0.0, fitting), MAX_PREFILL))  # infinite, if a worker tells rates that no machine has
