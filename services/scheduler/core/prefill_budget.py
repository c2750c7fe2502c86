"""How many prompt tokens a plan may compute beside decode rows.

Chunks hold back the streams that run, so `itl_target_s` bounds a step. But a request that lost its worker or its blocks
has readers as well, who wait for their next token already: to hold it back for the sake of others trades their short
gaps for its long one. Such a request may therefore stretch a step, up to where decode rows take a tenth of it: beyond,
the others would wait longer and it would gain next to nothing.
"""

from typing import TYPE_CHECKING

from services.scheduler.core.rates import prefill_tokens_within
from services.scheduler.core.request import Request

if TYPE_CHECKING:
    from services.scheduler.core.config import SchedulerConfig
    from services.scheduler.core.lane import Lane

LEAST_BLOCKS = 1.5
"""What prompts get beside the slowest decode rows: with fewer a pass takes hardly less, for it reads all weights."""
STRETCH = 10.0
"""Times that a step may take longer than its decode rows alone, for requests whose readers wait for their next token:
these rows then cost them a ninth of their time."""


class PrefillBudget:
    """What is left of one plan. Whatever is computed counts against both bounds."""

    __slots__ = ("_for_new", "room")

    def __init__(self, room: int, for_new: int) -> None:
        self.room = room
        """Tokens that requests may compute which go on with what they told."""
        self._for_new = min(room, for_new)

    def of(self, request: Request) -> int:
        """Tokens that this request may compute. Of one that has not told anything nobody waits for a next token."""
        return self.room if request.output else self._for_new

    def spend(self, num_tokens: int) -> None:
        """So many are computed."""
        self.room -= num_tokens
        self._for_new = max(0, self._for_new - num_tokens)

    def copy(self) -> "PrefillBudget":
        """For a trial."""
        return PrefillBudget(self.room, self._for_new)


def prefill_budget(config: "SchedulerConfig", lane: "Lane", num_single: int) -> PrefillBudget:
    """Of the lane's next plan, beside `num_single` rows that compute one token.

    However slow those are, some: prompts must go on. All tokens are reckoned as if they came behind the longest of the
    half-computed prompts.
    """
    room = config.max_num_batched_tokens - num_single
    if not config.itl_target_s:
        return PrefillBudget(room, room)
    num_before = max((seat.computed for seat in lane.prefill.values()), default=0)
    stretched_s = max(config.itl_target_s, STRETCH * lane.rates.decode_s(num_single))
    least = int(LEAST_BLOCKS * config.block_size)

    def within(seconds: float) -> int:
        fitting = prefill_tokens_within(seconds, num_single, lane.rates, num_before)
        return room if fitting is None else min(room, max(least, fitting))

    return PrefillBudget(within(stretched_s), within(config.itl_target_s))
