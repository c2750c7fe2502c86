"""Work is there and nothing goes on: told to health and metrics, with the reason, before somebody has to ask."""

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.core.diagnostics import Diagnosis
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.service import logs


@dataclass(frozen=True, slots=True)
class Stall:
    """`seconds` without progress; `reason` is a metric label, empty while all is well."""

    seconds: float = 0.0
    reason: str = ""


class StallDetector:
    """Looks at the core at intervals. A stall is told once it lasts `after_s`."""

    def __init__(self, after_s: float, clock: Callable[[], float]) -> None:
        self._after_s = after_s
        self._clock = clock
        self._progress: tuple[int, int, int] | None = None
        self._since = 0.0
        self._told = ""

    def look(self, core: SchedulerCore, waiting: list[Diagnosis]) -> Stall:
        """`waiting` is what `diagnose_waiting` says."""
        now, progress = self._clock(), _progress(core)
        if progress != self._progress or not core.requests:
            self._progress, self._since = progress, now
        seconds = now - self._since
        stall = Stall(seconds, _reason(core, waiting)) if seconds > self._after_s else Stall()
        self._log(stall)
        return stall

    def _log(self, stall: Stall) -> None:
        if stall.reason and stall.reason != self._told:
            logs.warning("stalled", seconds=round(stall.seconds, 1), reason=stall.reason)
        elif self._told and not stall.reason:
            logs.info("stall_over", reason=self._told)
        self._told = stall.reason


def _progress(core: SchedulerCore) -> tuple[int, int, int]:
    """What changes with every plan, every result and every end."""
    num_answered = sum(lane.answered for lane in core.lanes.values())
    return core.counters.plans, num_answered, sum(core.finished_by_reason.values())


def _reason(core: SchedulerCore, waiting: list[Diagnosis]) -> str:
    """Why nothing goes on: no worker, a step that does not end, or what the first waiting request waits for."""
    if not core.lanes:
        return "no_worker"
    if any(lane.in_flight for lane in core.lanes.values()):
        return "step"
    return waiting[0].reason if waiting else "no_plan"
