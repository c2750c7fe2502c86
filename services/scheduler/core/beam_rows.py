"""Beam searches on a lane: their rows, and their blocks.

    seat.blocks │ p p p p │ p p p p │               the prompt's full blocks, referred to once
    tails                           │ p a b c │ d │     beams share what they have in common: a block is in the tails
                                    │ p a b c │ e │     of all beams that came through it, and one that is not full is
                                    │ p a f g │ h │     in one only

A search has all of its rows from its admission and computes its prompt in the first of them. The pass that completes it
yields candidates; from them the search (`beams.py`) chooses the beams of the next step, and so on:

    result ──▶ `take`: beams chosen, blocks shared or given up ──▶ `plan`: blocks added, beams named ──▶ result ──▶ …

The first heir of a beam keeps its row and its blocks; another one shares the full ones and has a copy of the last. A
beam without heirs gives its blocks up when its result is applied: no plan in flight names it, so nothing is written
there. Beams are not planned ahead, while other rows are; a beam that is not named stands still.

A search delivers at its end. So if it is preempted, or its worker dies, it begins again with its prompt, and readers of
the log notice nothing.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core import beams
from services.scheduler.core.beams import BeamSearch, Step
from services.scheduler.core.extents import NOWHERE
from services.scheduler.core.seats import Ending, Ghost, InFlight, PlanDraft, Seat
from shared.messages import BeamRow, Candidates, CopyKind, StepResult

if TYPE_CHECKING:
    from services.scheduler.core.blocks import BlockPool
    from services.scheduler.core.lane import Lane


IN_PLACE = -1
"""On the wire: a beam goes on in its parent's last block."""


class Move(NamedTuple):
    """A beam that was chosen and is not planned yet."""

    row: int
    parent_row: int
    token: int
    source: int = NOWHERE
    """The block whose copy its tail lacks."""


@dataclass(slots=True, eq=False)
class BeamRows:
    """One search on its lane."""

    search: BeamSearch
    spare: list[int]
    """Its rows beside the seat's, ascending."""
    made: list[int] = field(default_factory=list)
    """Those of them that the worker knows."""
    rows: list[int] = field(default_factory=list)
    """By beam; empty before the prompt's result."""
    tails: list[list[int]] = field(default_factory=list)
    """By beam: blocks behind the prompt's full ones."""
    moves: list[Move] = field(default_factory=list)
    """By beam, until they are planned."""
    opens: bool = False
    """Whether the token of every move goes to a block of its own."""
    awaited: int = 0
    """The plan for whose result it waits."""

    @property
    def num_lacking(self) -> int:
        """Blocks that its moves take."""
        return len(self.moves) if self.opens else sum(move.source != NOWHERE for move in self.moves)


def num_lacking(lane: "Lane") -> int:
    """Blocks that beams take in the lane's next plan."""
    return sum(beam_rows.num_lacking for _, beam_rows in _searches(lane))


def _searches(lane: "Lane") -> Iterator[tuple[Seat, BeamRows]]:
    for seat in lane.searches.values():
        assert seat.beams is not None
        yield seat, seat.beams


# ---------------------------------------------------------------- making a plan


def enter(lane: "Lane", seat: Seat) -> None:
    """A request that was just seated searches with beams: take its other rows."""
    params = seat.request.submission.params
    seat.beams = BeamRows(BeamSearch(params), [heappop(lane.free_rows) for _ in range(params.beam_width - 1)])
    lane.searches[seat.row] = seat


def complete(lane: "Lane", seat: Seat, plan: InFlight) -> None:
    """The plan computes the end of the search's prompt."""
    assert seat.beams is not None
    del lane.prefill[seat.row]
    plan.searches.append(seat.row)
    seat.beams.awaited = plan.plan_id


def plan(lane: "Lane", draft: PlanDraft) -> None:
    """Name the beams that were chosen; the pool has the blocks."""
    for seat, beam_rows in _searches(lane):
        if beam_rows.moves:
            ends = _give_blocks(lane.pool, draft, seat, beam_rows)
            for move, end in zip(beam_rows.moves, ends, strict=True):
                draft.beams.append(BeamRow(move.row, move.parent_row, move.token, end))
            beam_rows.made = [row for row in beam_rows.spare if row in beam_rows.made or row in beam_rows.rows]
            lane.beam_rows.update(dict.fromkeys(beam_rows.made, seat))
            beam_rows.moves, beam_rows.awaited = [], draft.plan_id


def _give_blocks(pool: "BlockPool", draft: PlanDraft, seat: Seat, beam_rows: BeamRows) -> list[int]:
    """New blocks of the moves, at the ends of their tails; by move, the block that replaces its parent's last one."""
    tails = beam_rows.tails
    if beam_rows.opens:
        lasts = [tail[-1] if tail else seat.blocks[-1] for tail in tails]
        for tail, row, block_id in zip(tails, beam_rows.rows, pool.allocate_each(lasts), strict=True):
            tail.append(block_id)
            draft.give_blocks(row, [block_id])
        return [IN_PLACE] * len(tails)
    sources = [move.source for move in beam_rows.moves]
    copied = [source for source in sources if source != NOWHERE]
    copies = pool.allocate_each(copied)
    pool.copies.add(CopyKind.WITHIN, copied, copies)
    fresh = iter(copies)
    ends = [IN_PLACE if source == NOWHERE else next(fresh) for source in sources]
    for tail, end in zip(tails, ends, strict=True):
        if end != IN_PLACE:
            tail.append(end)
    return ends


# ---------------------------------------------------------------- taking a result


def contradicts(planned: InFlight, result: StepResult, ended: Collection[int]) -> bool:
    """Whether the candidates are not those of the rows that the plan names, less those that ended."""
    if not (planned.searches or result.candidates):
        return False
    rows = sorted(candidates.row for candidates in result.candidates)
    due = sorted(row for row in planned.searches if row not in ended)
    return rows != due or not all(beams.are_sound(candidates) for candidates in result.candidates)


def take(lane: "Lane", result: StepResult) -> list[Ending]:
    """Choose the next beams of every search that waited for this result; those that are over."""
    if not result.candidates:
        return []
    by_row = {candidates.row: candidates for candidates in result.candidates}
    endings = []
    for seat, beam_rows in _searches(lane):
        if beam_rows.awaited == result.step_id:
            beam_rows.awaited = 0
            _begin(lane, seat, beam_rows)
            ending = _advance(lane, seat, beam_rows, [by_row[row] for row in beam_rows.rows])
            if ending is not None:
                endings.append(ending)
    return endings


def _begin(lane: "Lane", seat: Seat, beam_rows: BeamRows) -> None:
    """The prompt is computed: its last block, if it is not full, is the first beam's."""
    if not beam_rows.rows:
        num_full = seat.known // lane.config.block_size
        beam_rows.rows, beam_rows.tails = [seat.row], [seat.blocks[num_full:]]
        del seat.blocks[num_full:]


def _advance(lane: "Lane", seat: Seat, beam_rows: BeamRows, candidates: Sequence[Candidates]) -> Ending | None:
    search = beam_rows.search
    num_written = seat.known + search.num_tokens
    lane.policy.on_searched(seat.request, len(candidates))
    steps = search.advance(candidates)
    if not steps:
        results = search.best()
        return Ending(seat.request, results[0].end_reason, results)
    beam_rows.opens = num_written % lane.config.block_size == 0
    _move(lane.pool, beam_rows, [seat.row, *beam_rows.spare], steps)
    return None


def _move(pool: "BlockPool", beam_rows: BeamRows, all_rows: Iterable[int], steps: Sequence[Step]) -> None:
    """Rows and blocks go to the heirs."""
    old_rows, old_tails = beam_rows.rows, beam_rows.tails
    parents = dict.fromkeys(step.parent for step in steps)
    kept = [old_rows[parent] for parent in parents]
    others = iter([row for row in all_rows if row not in kept])
    heirless = dict(parents)
    beam_rows.rows, beam_rows.tails, beam_rows.moves = [], [], []
    for parent, token in steps:
        row, tail, source = old_rows[parent], old_tails[parent], NOWHERE
        if parent in heirless:
            del heirless[parent]
        else:
            row = next(others)
            source = NOWHERE if beam_rows.opens else tail[-1]
            tail = tail[:] if beam_rows.opens else tail[:-1]
            pool.share(tail)
        beam_rows.rows.append(row)
        beam_rows.tails.append(tail)
        beam_rows.moves.append(Move(row, old_rows[parent], token, source))
    for parent, tail in enumerate(old_tails):
        if parent not in parents:
            pool.release(tail)


# ---------------------------------------------------------------- leaving


def leave(lane: "Lane", seat: Seat, ended_row: int | None) -> list[int]:
    """The search is over or interrupted: its rows go, but for the seat's own and the one that the worker ended.

    Of those two the caller knows one: the row that ended, or else the seat's.

    Returns:
        The blocks that it gives up beside the seat's.
    """
    beam_rows = seat.beams
    assert beam_rows is not None
    del lane.searches[seat.row]
    for row in beam_rows.spare:
        lane.beam_rows.pop(row, None)
        if row in beam_rows.made and row != ended_row:
            lane.ghosts[row] = Ghost(row, first=0, last=0)
        elif row != ended_row:
            heappush(lane.free_rows, row)
    if ended_row in beam_rows.made:
        lane.ghosts[seat.row] = Ghost(seat.row, first=0, last=0)
    return [block_id for tail in beam_rows.tails for block_id in tail]


def restore(lane: "Lane") -> list[int]:
    """Rebuild what follows from the restored searches; their rows beside the seats'."""
    for seat, beam_rows in _searches(lane):
        lane.beam_rows.update(dict.fromkeys(beam_rows.made, seat))
    return [row for _, beam_rows in _searches(lane) for row in beam_rows.spare]
