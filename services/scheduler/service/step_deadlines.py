"""A step that never ends: the worker's heartbeat goes on, but no result comes.

The deadline of a step follows from its plan's size and the worker's own rates, generously: a machine may be busy with
other things, and a worker that is fenced computes all of its requests anew. Nothing is done per step: the leader looks
at intervals whether a worker has answered anything since the last look.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.scheduler.core.lane import Lane
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.service.trimmer import Incarnation

FACTOR = 20.0
"""A step may take so many times what the worker's rates promise, beside the floor."""
UNKNOWN_FLOORS = 6.0
"""So many floors if the rates are not known yet: a worker tells them with its first result."""
BLIND_AFTER_S = 1.0
"""If the leader did not look for this long, it or Redis had stopped: results may be on their way, all begins anew."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step that was in hand at an earlier look."""

    answered: int
    since: float


class StepDeadlines:
    """Who is overdue. `floor_s`: least deadline of a step; 0: nobody ever is."""

    def __init__(self, floor_s: float, clock: Callable[[], float]) -> None:
        self._floor_s = floor_s
        self._clock = clock
        self._pending: dict[Incarnation, _Pending] = {}
        self._last_look = float("-inf")

    def overdue(self, core: SchedulerCore, answered: Mapping[Incarnation, int]) -> list[Incarnation]:
        """Those whose oldest plan in flight is past its deadline. `answered`: the last step of each that was read."""
        now = self._clock()
        if now - self._last_look > BLIND_AFTER_S:
            self._pending.clear()
        self._last_look = now
        self._pending = {
            incarnation: self._look(incarnation, max(lane.answered, answered.get(incarnation, 0)), now)
            for incarnation, lane in _working(core)
        }
        return [
            incarnation
            for incarnation, lane in _working(core)
            if self._floor_s and now - self._pending[incarnation].since > self.deadline_s(lane)
        ]

    def deadline_s(self, lane: Lane) -> float:
        """Seconds that the step in hand may take."""
        expected = lane.next_step_s()
        return self._floor_s * UNKNOWN_FLOORS if expected is None else self._floor_s + FACTOR * expected

    def _look(self, incarnation: Incarnation, answered: int, now: float) -> _Pending:
        before = self._pending.get(incarnation)
        return before if before is not None and before.answered == answered else _Pending(answered, now)


def _working(core: SchedulerCore) -> list[tuple[Incarnation, Lane]]:
    lanes = core.lanes.values()
    return [(Incarnation(lane.worker, lane.incarnation), lane) for lane in lanes if lane.in_flight]
