"""A worker that leaves hands its requests over, as soon as others have room for them.

    others have room for its first requests ──▶ no plan until all plans are answered ──▶ those requests wait again
    else ──▶ it goes on computing them                                                    with all of their tokens

A token of a plan in flight would come a second time from elsewhere, so the lane pauses first: at most `plan_ahead`
steps. Requests that find no room elsewhere run on here, to their end if need be. Until they have left, what they need
elsewhere is kept free of newcomers. A lane on which nothing is left is drained: the leader fences it, and the process
may go.
"""

from typing import TYPE_CHECKING

from services.scheduler.core.lane import Lane
from services.scheduler.core.placement import Placement
from services.scheduler.core.request import Signal
from services.scheduler.core.seats import Seat
from services.scheduler.core.suspects import clear
from shared.messages import EventKind

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


def pauses_to_hand_over(core: "SchedulerCore", lane: Lane) -> bool:
    """Hand over what others have room for. True: that waits for results, so no plan may be made for the lane now."""
    movable = _movable(core, lane)
    if movable and lane.in_flight:
        return True
    for seat in movable:
        _hand_over(core, seat)
    return False


def reserve(core: "SchedulerCore", placement: Placement) -> None:
    """Keep room for the requests of draining lanes, before newcomers take it."""
    for lane in core.lanes.values():
        if lane.draining and not placement.all_leave:
            _place_first(core, lane, placement)


def drained_workers(core: "SchedulerCore") -> list[tuple[str, int]]:
    """(worker, incarnation) of draining workers on which nothing is left: no request, no plan in flight."""
    return [(lane.worker, lane.incarnation) for lane in core.lanes.values() if lane.draining and lane.is_idle]


def _movable(core: "SchedulerCore", lane: Lane) -> list[Seat]:
    placement = Placement(core.lanes.values(), core.config)
    if placement.all_leave:
        return []
    for request in core.waiting.begun():  # here perhaps, and have not found their room yet
        placement.place(request)
    return _place_first(core, lane, placement)


def _place_first(core: "SchedulerCore", lane: Lane, placement: Placement) -> list[Seat]:
    """The lane's first requests in the policy's order, for which a trial of the others has room."""
    placed = []
    for seat in sorted(lane.seats.values(), key=lambda seat: core.policy.precedence(seat.request)):
        lane.collect(seat)
        if placement.place(seat.request) is None:
            break
        placed.append(seat)
    return placed


def _hand_over(core: "SchedulerCore", seat: Seat) -> None:
    """Nothing of the lane is in flight, so the request's tokens are exact."""
    request = seat.request
    clear(seat)
    seat.lane.drop(seat)
    request.apply(Signal.REQUEUE)
    core.waiting.push(request)
    core.counters.handovers += 1
    core.emit(request, EventKind.PREEMPTED, len(request.output), reason="drain")
