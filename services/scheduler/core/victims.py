"""Who is preempted: for lack of blocks, or to make way for one that has a claim to a seat (see `policies/fair.py`).

Never a lane's oldest request, by arrival: alone it fits, so it always comes to its end, and there is no livelock.
"""

from typing import TYPE_CHECKING

from services.scheduler.core import swap
from services.scheduler.core.lane import Lane
from services.scheduler.core.placement import Placement
from services.scheduler.core.policies.base import ClassKey
from services.scheduler.core.seats import Seat

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


def choose_victim(core: "SchedulerCore", lane: Lane) -> Seat:
    """The seat that gives up its blocks: the last one in the policy's order."""
    seats = _last_first(core, lane)
    assert seats, f"worker {lane.worker} lacks blocks for its oldest request alone"
    return seats[0]


def displaced(core: "SchedulerCore", lane: Lane) -> list[Seat]:
    """Seats that the lane's next plan takes from their requests, so that the next one in order has what it claims.

    None if it claims nothing, if some lane has room for it, or if all that may be taken here would not be enough.
    """
    if not (core.policy.has_claims and core.policy.has_donors):
        return []
    request = core.waiting.first()
    if request is None or lane.draining or lane.broken or not core.policy.claims_seat(request):
        return []
    without_copies = lane if swap.all_give_way(core, lane) else None
    placement = Placement(core.lanes.values(), core.config, without_copies=without_copies)
    if not lane.holds(request) or placement.place(request) is not None:
        return []
    leaving: list[Seat] = []
    by_class: dict[ClassKey, int] = {}
    for seat in _last_first(core, lane):
        class_key = core.policy.class_of(seat.request)
        num_leaving = by_class.get(class_key, 0)
        if seat.beams is not None or not core.policy.yields_to(seat, request, num_leaving):
            continue
        leaving.append(seat)
        by_class[class_key] = num_leaving + 1
        if not placement.lacks_without(request, lane, leaving):
            return leaving
    return []


def _last_first(core: "SchedulerCore", lane: Lane) -> list[Seat]:
    """Seats that may be taken, the last one in the policy's order first."""
    by_arrival = sorted(lane.seats.values(), key=lambda seat: seat.request.arrival)
    return sorted(by_arrival[1:], key=lambda seat: core.policy.precedence(seat.request), reverse=True)
