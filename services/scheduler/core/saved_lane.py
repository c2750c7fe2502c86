"""A lane's part of the snapshot: its rows, its plans in flight, its blocks."""

from collections.abc import Mapping

from services.scheduler.core.cpu_tier import SwappedOut
from services.scheduler.core.history import TokenHistory
from services.scheduler.core.lane import Lane
from services.scheduler.core.prefix_cache import Parent
from services.scheduler.core.rates import Rates
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.saved import Saved
from services.scheduler.core.saved_beams import SavedBeams, restore_beams, save_beams
from services.scheduler.core.saved_pool import SavedPool, restore_pool, save_pool
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.seats import Ghost, InFlight, Seat
from shared.packing import pack_int32, unpack_int32


class _SavedSeat(Saved, frozen=True):
    row: int
    request_id: str
    added: int
    known: int
    blocks: bytes
    computed: int
    first: int
    last: int
    num_kept: int
    parent: Parent
    beams: SavedBeams | None


class SavedLane(Saved, frozen=True):
    worker: str
    incarnation: int
    index: int
    draining: bool
    broken: bool
    planned: int
    answered: int
    in_flight: list[tuple[int, int, list[tuple[int, int]], list[int], int, int]]
    seats: list[_SavedSeat]
    ghosts: list[tuple[int, int, int, int]]
    """(row, first, last, dropped)"""
    pool: SavedPool
    block_bytes: int
    fingerprint: str
    rates: tuple[float, ...]
    swapped: list[tuple[str, bytes, int]]
    """(request, packed slots, computed tokens)"""


def save_lane(lane: Lane) -> SavedLane:
    return SavedLane(
        worker=lane.worker,
        incarnation=lane.incarnation,
        index=lane.index,
        draining=lane.draining,
        broken=lane.broken,
        planned=lane.planned,
        answered=lane.answered,
        in_flight=[_save_plan(plan) for plan in lane.in_flight],
        seats=[_save_seat(seat) for seat in lane.seats.values()],
        ghosts=[(ghost.row, ghost.first, ghost.last, ghost.dropped) for ghost in lane.ghosts.values()],
        pool=save_pool(lane.pool),
        block_bytes=lane.block_bytes,
        fingerprint=lane.fingerprint,
        rates=tuple(lane.rates),
        swapped=[_save_swapped(request) for request in lane.swapped.values()],
    )


def _save_plan(plan: InFlight) -> tuple[int, int, list[tuple[int, int]], list[int], int, int]:
    return plan.plan_id, plan.num_yields, plan.chunks, plan.searches, plan.num_prefill, plan.num_copied


def _save_swapped(request: Request) -> tuple[str, bytes, int]:
    swapped = request.swapped
    assert swapped is not None
    return request.request_id, pack_int32(swapped.slots), swapped.num_computed


def _save_seat(seat: Seat) -> _SavedSeat:
    return _SavedSeat(
        row=seat.row,
        request_id=seat.request.request_id,
        added=seat.added,
        known=seat.known,
        blocks=pack_int32(seat.blocks),
        computed=seat.computed,
        first=seat.first,
        last=seat.last,
        num_kept=seat.num_kept,
        parent=seat.parent,
        beams=save_beams(seat.beams),
    )


def restore_lane(saved: SavedLane, blocks: Mapping[int, bytes], core: SchedulerCore) -> Lane:
    """The lane; `blocks` are the parts of its cached blocks, by place.

    Raises:
        UnusableSnapshot: those are not its blocks.
    """
    lane = Lane(
        saved.worker,
        saved.incarnation,
        saved.index,
        restore_pool(saved.pool, blocks, core.config),
        core.config,
        core.policy,
        saved.block_bytes,
        saved.fingerprint,
    )
    lane.draining, lane.broken = saved.draining, saved.broken
    lane.clock.planned, lane.answered = saved.planned, saved.answered
    lane.in_flight.extend(InFlight(*plan) for plan in saved.in_flight)
    lane.history = TokenHistory(core.config.max_num_seqs, base=saved.answered + 1)
    lane.rates = Rates(*saved.rates)
    ghosts = [Ghost(row, first, last, dropped) for row, first, last, dropped in saved.ghosts]
    lane.restore_rows([_restore_seat(seat, lane, core) for seat in saved.seats], ghosts)
    for request_id, slots, num_computed in saved.swapped:
        request = lane.swapped[request_id] = core.requests[request_id]
        request.swapped = SwappedOut(lane, list(unpack_int32(slots)), num_computed)
        request.state = RequestState.SWAPPED
    lane.pool.resume(slot for request in lane.swapped.values() if request.swapped for slot in request.swapped.slots)
    return lane


def _restore_seat(saved: _SavedSeat, lane: Lane, core: SchedulerCore) -> Seat:
    request = core.requests[saved.request_id]
    seat = Seat(
        lane=lane,
        row=saved.row,
        request=request,
        added=saved.added,
        known=saved.known,
        blocks=list(unpack_int32(saved.blocks)),
        computed=saved.computed,
        first=saved.first,
        last=saved.last,
        mark=max(saved.first, min(lane.answered, saved.last) + 1),
        num_kept=saved.num_kept,
        parent=saved.parent,
        beams=restore_beams(saved.beams, request.submission.params),
    )
    for table in (seat.blocks, *(seat.beams.tails if seat.beams else ())):
        lane.pool.adopt(table)
    request.seat = seat
    request.state = RequestState.RUNNING
    return seat
