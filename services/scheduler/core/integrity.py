"""Every invariant of the core's state, recomputed from the seats."""

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from services.scheduler.core.lane import Lane, Seat
from services.scheduler.core.request import RequestState

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


def check_integrity(core: "SchedulerCore") -> None:
    """Raises AssertionError on the first invariant that does not hold."""
    for lane in core.lanes.values():
        _check_blocks(lane)
        _check_rows(lane)
        _check_clock(lane)
    _check_requests(core)


def _check_blocks(lane: Lane) -> None:
    """Free, used and quarantined blocks are all blocks; references are exact; tables hold what their tokens need."""
    pool = lane.pool
    tables = [seat.blocks for seat in lane.seats.values()] + [blocks for _, blocks in pool.quarantined()]
    held = Counter(itertools.chain.from_iterable(tables))
    free = pool.free_ids()
    assert sorted([*held, *free]) == list(range(pool.num_blocks)), "a block is lost, or both free and in use"
    for block in range(pool.num_blocks):
        assert pool.references(block) == held[block] <= 1, f"block {block} is miscounted or in two tables"
    for seat in lane.seats.values():
        assert len(seat.blocks) == _blocks_held(lane, seat), f"row {seat.row} has {len(seat.blocks)} blocks"


def _blocks_held(lane: Lane, seat: Seat) -> int:
    """Blocks for every token whose KV plans up to now write."""
    decoded = max(0, min(lane.planned, seat.last) - seat.first) if seat.first else 0
    return lane.config.blocks_for(seat.known + decoded)


def _check_rows(lane: Lane) -> None:
    rows = sorted([*lane.seats, *lane.ghosts, *lane.free_rows])
    assert rows == list(range(lane.config.max_rows)), "a row is lost"
    for row, seat in lane.seats.items():
        assert seat.row == row and seat.lane is lane
        assert seat.request.seat is seat, f"row {row} is not its request's seat"


def _check_clock(lane: Lane) -> None:
    seats = list(lane.seats.values())
    decoding = [seat for seat in seats if seat.first and seat.last > lane.planned]
    assert lane.decode == len(decoding) <= lane.config.max_rows
    assert sorted(lane.prefill) == sorted(seat.row for seat in seats if not seat.first)
    phased = [seat.row for phase in lane.phases for seat in phase.values()]
    assert sorted(phased) == sorted(seat.row for seat in decoding)
    scheduled = [(day, row) for day, rows in lane.calendar.items() for row in rows]
    assert sorted(scheduled) == sorted((seat.last, seat.row) for seat in seats if seat.first)
    assert [plan.plan_id for plan in lane.in_flight] == list(range(lane.answered + 1, lane.planned + 1))
    assert len(lane.in_flight) <= lane.config.plan_ahead
    assert lane.history.end == lane.answered + 1
    for seat in seats:
        assert seat.computed <= seat.known and (seat.computed == seat.known) == (seat.first > 0)


def _check_requests(core: "SchedulerCore") -> None:
    waiting = list(core.waiting)
    assert waiting == sorted(waiting, key=core.waiting.policy.key)
    assert len(set(waiting)) == len(waiting)
    for request in core.requests.values():
        is_waiting = request.seat is None
        assert request.state is (RequestState.WAITING if is_waiting else RequestState.RUNNING)
        assert (request in waiting) == is_waiting
        if request.seat is not None:
            assert core.lanes[request.seat.lane.worker].seats[request.seat.row] is request.seat
    seated = sum(len(lane.seats) for lane in core.lanes.values())
    assert len(core.requests) == len(waiting) + seated
