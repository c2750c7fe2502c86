"""One tick: its inputs in their order, then at most one plan. Live work, replay and standbys all run through it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.scheduler.core.outcomes import Finished, ScheduledPlan
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import (
    Abort,
    IntakeMessage,
    LogMessage,
    ProcessDied,
    RequestEvent,
    StepResult,
    Stop,
    Submission,
    Submit,
    Tick,
    WorkerEvent,
    WorkerFenced,
    WorkerJoined,
)


@dataclass(frozen=True, slots=True)
class TickOutcome:
    """What a tick decided; all of it is committed with the tick."""

    plan: ScheduledPlan | None
    """Carries the tick."""
    events: tuple[RequestEvent, ...]
    finished: tuple[Finished, ...]
    cached: tuple[tuple[str, int], ...]
    """(request, cached prompt tokens) of first admissions with hits."""
    waits: tuple[tuple[int, float], ...]
    """(priority, seconds since its arrival at a gateway) of first admissions: for metrics."""

    @property
    def is_empty(self) -> bool:
        """Nothing was decided. Without inputs, such a tick changed nothing and need not be committed."""
        return self.plan is None and not self.events


def apply_tick(
    core: SchedulerCore,
    tick: Tick,
    log: Iterable[LogMessage],
    intake: Iterable[IntakeMessage],
    submissions: Mapping[str, Submission],
) -> TickOutcome:
    """Apply log, intake and the tick's events, then plan once.

    `log` and `intake` hold what lies between the previous tick's ids and this one's. `submissions` are the records that
    `intake` points to; a `Submit` whose record is missing is ignored and counted, like every late, doubled or unknown
    message.
    """
    core.now = tick.now
    for entry in log:
        _apply_log(core, entry)
    for message in intake:
        _apply_intake(core, message, submissions)
    for event in tick.events:
        _apply_event(core, event)
    scheduled = core.schedule(tick.now)
    return TickOutcome(
        plan=None if scheduled is None else scheduled.with_tick(tick),
        events=tuple(core.take_events()),
        finished=tuple(core.take_finished()),
        cached=tuple(core.take_cached()),
        waits=tuple(core.take_waits()),
    )


def _apply_log(core: SchedulerCore, entry: LogMessage) -> None:
    if isinstance(entry, StepResult):
        core.update_from_result(entry)
    elif isinstance(entry, WorkerFenced):
        core.on_worker_lost(entry.worker, entry.incarnation)
    # A TickEntry is the core's own: what it says has happened already.


def _apply_intake(core: SchedulerCore, message: IntakeMessage, submissions: Mapping[str, Submission]) -> None:
    if isinstance(message, Submit):
        submission = submissions.get(message.request_id)
        if submission is None:
            core.ignore_message()
        else:
            core.add_request(submission)
    elif isinstance(message, Stop):
        core.stop_request(message.request_id, message.num_output_tokens)
    elif isinstance(message, Abort):
        core.abort_request(message.request_id, message.cause)
    else:
        assert isinstance(message, ProcessDied)  # for whoever fences; the core hears of it by WorkerFenced


def _apply_event(core: SchedulerCore, event: WorkerEvent) -> None:
    if isinstance(event, WorkerJoined):
        core.on_worker_joined(event)
    else:
        core.on_worker_draining(event)
