"""Who sits on a lane's rows, and what its plans in flight say of them."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core.prefix_cache import Parent
from services.scheduler.core.request import Request
from shared.messages import EndReason, NewRow

if TYPE_CHECKING:
    from services.scheduler.core.lane import Lane


@dataclass(slots=True, eq=False)
class Seat:
    """One occupant of one row."""

    lane: "Lane"
    row: int
    request: Request
    added: int
    """The plan that added it."""
    known: int
    """Tokens it came with: prompt and output committed before."""
    blocks: list[int]
    """Its block table."""
    computed: int = 0
    """Known tokens that plans up to now compute."""
    first: int = 0
    """The plan in which it yields its first token; 0 while in prefill."""
    last: int = 0
    """The last plan in which it can yield."""
    mark: int = 0
    """The first step whose token is not in the request's `output`."""
    num_kept: int = 0
    """Blocks at the front of its table that have been cached, or whose content had been."""
    parent: Parent = 0
    """Serial number of the last of those in the cache."""

    def yields_in(self, plan_id: int) -> bool:
        return 0 < self.first <= plan_id <= self.last


@dataclass(slots=True, eq=False)
class Ghost:
    """A row whose request is gone, until the worker has dropped it for sure. Plans in flight still let it yield."""

    row: int
    first: int
    last: int
    dropped: int = 0
    """The plan that drops it; 0: the next one will."""

    def yields_in(self, plan_id: int) -> bool:
        return 0 < self.first <= plan_id <= self.last


@dataclass(slots=True)
class InFlight:
    """A plan without a result."""

    plan_id: int
    num_yields: int
    """Rows that will yield a token, as far as is known."""
    chunks: list[tuple[int, int]]
    """(row, known tokens computed after it) of rows in prefill."""


class Ending(NamedTuple):
    """A live request whose row the worker ended."""

    request: Request
    reason: EndReason


@dataclass(slots=True)
class PlanDraft:
    """A plan in the making."""

    plan_id: int
    added: list[NewRow] = field(default_factory=list)
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    chunks: list[tuple[int, int]] = field(default_factory=list)
    reached: list[tuple[int, int]] = field(default_factory=list)
    """(row, known tokens computed after this plan) of the rows in `chunks`."""
    completed: list[Seat] = field(default_factory=list)
    """Seats whose last known token is computed in this plan."""

    def give_blocks(self, row: int, blocks: list[int]) -> None:
        for block_id in blocks:
            self.blocks.append(row)
            self.blocks.append(block_id)
