"""What a preemption costs: computing the victim's tokens again, or copying its blocks out and in.

Nothing is measured here: rates come with step results (`rates.py`).
"""

from enum import StrEnum

from services.scheduler.core.rates import Rates


class Preemption(StrEnum):
    """What becomes of the KV of a request that gives up its blocks."""

    RECOMPUTE = "recompute"
    """It is computed again from the tokens."""
    SWAP = "swap"
    """It is copied to the host pool and back, if there is room."""
    AUTO = "auto"
    """Whichever takes less time, by the rates that the worker measured."""


def swap_is_cheaper(*, num_tokens: int, num_blocks: int, block_bytes: int, rates: Rates, num_before: int = 0) -> bool:
    """Whether `num_tokens` behind `num_before` others take longer to compute again than `num_blocks` to copy twice.

    False if not known.
    """
    if not (rates.prefill and rates.copy and block_bytes):
        return False
    return 2 * num_blocks * block_bytes / rates.copy < rates.prefill_s(num_tokens, num_before)
