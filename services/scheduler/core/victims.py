"""Whom a lack of blocks hits."""

from typing import TYPE_CHECKING

from services.scheduler.core.lane import Lane
from services.scheduler.core.seats import Seat

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


def choose_victim(core: "SchedulerCore", lane: Lane) -> Seat:
    """The seat that gives up its blocks: the last one in the policy's order.

    Never the lane's oldest request, by arrival: alone it fits, so it always comes to its end, and there is no livelock.
    """
    oldest, *others = sorted(lane.seats.values(), key=lambda seat: seat.request.arrival)
    assert others, f"request {oldest.request.request_id} lacks blocks though it is alone"
    return max(others, key=lambda seat: core.policy.precedence(seat.request))
