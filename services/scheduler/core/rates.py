"""What a worker has measured of itself, and what follows from it for the size of a prefill chunk.

The core never measures: rates come in step results, so a replay sees the same ones.
"""

from collections.abc import Sequence
from math import hypot, isfinite, sqrt
from typing import NamedTuple

MAX_PREFILL = 2**31 - 1
"""Tokens of a step; more than any budget."""
NUM_TOLD = 4
"""Rates that every worker tells; newer ones tell more."""


class Rates(NamedTuple):
    """Of one worker incarnation; 0 is unknown."""

    prefill: float = 0.0
    """Tokens per second, without context."""
    decode_base_s: float = 0.0
    """Seconds of a decode step, whatever its rows."""
    decode_row_s: float = 0.0
    """Seconds that each row adds."""
    copy: float = 0.0
    """Bytes per second between KV cache and host pool."""
    pair_s: float = 0.0
    """Seconds that a prefill token adds for each token that it attends to."""

    def prefill_s(self, num_tokens: int, num_before: int = 0) -> float:
        """Seconds to compute this many tokens behind `num_before` others; the rate must be known."""
        return num_tokens / self.prefill + self.pair_s * num_tokens * (num_before + num_tokens / 2)

    def decode_s(self, num_rows: int) -> float:
        """Seconds of a decode step with this many rows; 0 if not known."""
        return self.decode_base_s + num_rows * self.decode_row_s

    def step_s(self, num_rows: int, num_prefill: int, num_bytes: int, num_before: int = 0) -> float | None:
        """Seconds of a step that also prefills, behind `num_before` tokens, and copies; None if a rate is lacking."""
        decode_s = self.decode_s(max(1, num_rows))
        if not decode_s or (num_prefill and not self.prefill) or (num_bytes and not self.copy):
            return None
        prefill_s = num_prefill and self.prefill_s(num_prefill, num_before)
        return decode_s + prefill_s + (num_bytes and num_bytes / self.copy)


def newest_rates(known: Rates, told: Sequence[float]) -> Rates:
    """What a result tells, if it tells anything that makes sense. What it does not know stays as it was."""
    if NUM_TOLD <= len(told) <= len(known) and all(isfinite(rate) and rate >= 0 for rate in told):
        new = Rates(*told)
        prefill = new if new.prefill else known
        decode = new if new.decode_s(1) else known
        copy = new.copy or known.copy
        return Rates(prefill.prefill, decode.decode_base_s, decode.decode_row_s, copy, prefill.pair_s)
    return known


def prefill_tokens_within(itl_target_s: float, num_decode: int, rates: Rates, num_before: int = 0) -> int | None:
    """Prefill tokens behind `num_before` others that fit a step beside `num_decode` decode rows if it shall take
    `itl_target_s` seconds.

    None if nothing bounds them: no target, nobody decodes, or the rates are not known yet.

    The n tokens solve  n * (1 / prefill + pair_s * num_before) + pair_s * n² / 2  =  seconds that are left.
    """
    if not (itl_target_s and num_decode and rates.prefill and rates.decode_s(num_decode)):
        return None
    seconds = max(0.0, itl_target_s - rates.decode_s(num_decode))
    fitting = seconds * rates.prefill
    if rates.pair_s:
        token_s = 1 / rates.prefill + rates.pair_s * num_before
        fitting = 2 * seconds / (token_s + hypot(token_s, sqrt(2 * rates.pair_s * seconds)))
    return int(min(fitting, MAX_PREFILL))  # infinite, if a worker tells rates that no machine has
