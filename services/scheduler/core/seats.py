"""Who sits on a lane's rows, and what its plans in flight say of them."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core.beams import Result
from services.scheduler.core.prefix_cache import Parent
from services.scheduler.core.request import Request
from shared.messages import BeamRow, EndReason, NewRow

if TYPE_CHECKING:
    from services.scheduler.core.beam_rows import BeamRows
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
    beams: "BeamRows | None" = None
    """Of a beam search: it computes its prompt as any other, and then never is a decode row."""

    @property
    def num_yielded(self) -> int:
        """Output tokens that it had here; of a search, those of each beam."""
        if self.beams is not None:
            return self.beams.search.num_tokens
        return max(0, min(self.lane.answered, self.last) + 1 - self.first) if self.first else 0

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
    searches: list[int] = field(default_factory=list)
    """Rows that will yield candidates."""
    num_prefill: int = 0
    """Tokens in its chunks."""
    num_copied: int = 0
    """Blocks that it copies."""

    def forget(self, row: int, num_yields: int) -> None:
        """The row ended before: it yields nothing here."""
        self.num_yields -= num_yields
        if row in self.searches:
            self.searches.remove(row)


class Ending(NamedTuple):
    """A live request whose row the worker ended, or whose beam search is over."""

    request: Request
    reason: EndReason
    results: Sequence[Result] = ()
    """Of the search, best first."""


@dataclass(slots=True)
class PlanDraft:
    """A plan in the making."""

    plan_id: int
    added: list[NewRow] = field(default_factory=list)
    blocks: "array[int]" = field(default_factory=lambda: array("i"))
    chunks: list[tuple[int, int]] = field(default_factory=list)
    reached: list[tuple[int, int]] = field(default_factory=list)
    """(row, known tokens computed after this plan) of the rows in `chunks`."""
    beams: list[BeamRow] = field(default_factory=list)
    completed: list[Seat] = field(default_factory=list)
    """Seats whose last known token is computed in this plan."""

    def give_blocks(self, row: int, blocks: list[int]) -> None:
        self.give_each([row] * len(blocks), blocks)

    def give_each(self, rows: Collection[int], blocks: Sequence[int]) -> None:
        """One block to each row."""
        pairs = array("i", bytes(8 * len(rows)))
        pairs[::2], pairs[1::2] = array("i", rows), array("i", blocks)
        self.blocks += pairs
