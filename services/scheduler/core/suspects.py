"""Requests that kill workers. A request whose computation ends its worker (a crash, a kernel that never returns, more
memory than there is) would do so on the next one, for ever, and every request beside it would begin again and again.

A dead worker does not say who it was: each request that it had in its plans may be, so each is blamed for one death.
Who yields `CLEARED_TOKENS` on a worker afterwards is cleared, since whoever kills workers does not get that far.
Before its last chance a request is a suspect. At most one suspect is on a worker at a time, on trial: nobody is
admitted beside it until it is cleared, and if the worker dies meanwhile it alone is blamed. So a neighbour of the
guilty one has a trial of its own, which it passes, and workers that die for other reasons must do so
`max_worker_deaths` times in a row before `CLEARED_TOKENS` tokens of one and the same request, to end it.

After a cold start of the scheduler nobody is blamed for anything.
"""

from typing import TYPE_CHECKING

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import Request

if TYPE_CHECKING:
    from services.scheduler.core.lane import Lane
    from services.scheduler.core.seats import Seat

CLEARED_TOKENS = 3
"""Not one: what a step of decode kills may still yield a token at each of its prefills, and that of a plan that was
computed beside. Not many: where workers die for other reasons, whoever is cleared late is blamed for these."""


def is_suspect(request: Request, config: SchedulerConfig) -> bool:
    """Whether one more death ends the request, which had one at least."""
    return bool(config.max_worker_deaths) and request.num_deaths >= max(1, config.max_worker_deaths - 1)


def is_cleared(seat: "Seat") -> bool:
    """Whether its worker survived it."""
    return seat.num_yielded >= CLEARED_TOKENS


def on_trial(lane: "Lane") -> "Seat | None":
    """The suspect that is on the lane and not cleared."""
    seat = lane.trial
    return seat if seat is not None and lane.seats.get(seat.row) is seat and not is_cleared(seat) else None


def clear(seat: "Seat") -> None:
    """It leaves its worker: what is held against it counts no more if that survived it."""
    if seat.request.num_deaths and is_cleared(seat):
        seat.request.num_deaths = 0


def blame(lane: "Lane") -> list[Request]:
    """The lane's worker is gone: note it against those that may have been the reason; who had all chances."""
    limit = lane.config.max_worker_deaths
    for seat in lane.seats.values():
        clear(seat)
    if not limit or lane.draining:
        return []
    begun = {row for plan in lane.in_flight for row, _ in plan.chunks}
    computed = [s for s in lane.seats.values() if lane.in_flight and (s.row in begun or s.computed == s.known)]
    suspect = on_trial(lane)
    blamed = [suspect] if suspect in computed and suspect is not None else computed
    for seat in blamed:
        seat.request.num_deaths += 1
    return [seat.request for seat in blamed if seat.request.num_deaths >= limit]
