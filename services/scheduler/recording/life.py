"""One request's life, from a recording: when it waited and why, where it ran, who took its blocks, how it ended."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.recording.format import RecordingError, TickRecord, decode_plan
from services.scheduler.recording.reader import RecordedFile
from services.scheduler.recording.verify import Step, replay_file
from shared.messages import Abort, EventKind, RequestEvent, StepPlan, StepResult, Stop, Submission
from shared.packing import unpack_int32


def explain_request(files: list[RecordedFile], request_id: str) -> Iterator[str]:
    """Lines for people.

    Raises:
        RecordingError: the recording does not know the request, or is damaged.
    """
    life = _Life(request_id, files[0].header.now)
    last = -1
    for file in files:
        for submission in file.header.submissions:
            if submission.request_id == request_id and not life.is_known:
                yield life.at(file.header.now, file.header.tick, f"is there already: {_asked(submission)}")
        for step in replay_file(file, before=life.look):
            if step.record.tick.number > last:
                last = step.record.tick.number
                yield from life.after(step)
    if not life.is_known:
        raise RecordingError(f"the recording knows no request {request_id!r}")


def _asked(submission: Submission) -> str:
    parts = [
        f"{len(submission.prompt_tokens) // 4} prompt tokens, max_tokens {submission.params.max_tokens}",
        f"priority {submission.priority}" if submission.priority else "",
        f"tenant {submission.tenant}" if submission.tenant else "",
        f"a choice of {submission.group}" if submission.group else "",
    ]
    return ", ".join(filter(None, parts))


@dataclass(slots=True)
class _Life:
    request_id: str
    start: float
    is_known: bool = False
    is_over: bool = False
    since: float = 0.0
    """Since when it waits."""
    reason: str = ""
    """Why it waits; empty while it runs."""
    reason_since: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds by reason, of this time of waiting. A reason is told when it first holds."""
    place: str = ""
    """Where it sat before the tick."""

    def at(self, now: float, tick: int, text: str) -> str:
        self.is_known = True
        return f"+{now - self.start:9.3f} s  tick {tick:<7} {text}"

    def look(self, core: SchedulerCore, record: TickRecord) -> None:
        """Before a tick."""
        request = core.requests.get(self.request_id)
        seat = None if request is None else request.seat
        self.place = f"{seat.lane.worker}, row {seat.row}" if seat else ""

    def after(self, step: Step) -> Iterator[str]:
        """What the tick means for the request."""
        record, now = step.record, step.record.tick.now
        plan = decode_plan(record)
        for text in (*self._told(record), *self._decided(step, plan)):
            yield self.at(now, record.tick.number, text)
        if not self.is_over and self.is_known:
            yield from (self.at(now, record.tick.number, text) for text in self._waits(step, plan))

    def _told(self, record: TickRecord) -> Iterator[str]:
        for submission in record.submissions:
            if submission.request_id == self.request_id:
                self.is_known, self.since = True, record.tick.now
                yield f"submitted: {_asked(submission)}"
        for message in record.intake:
            if isinstance(message, Abort) and message.request_id == self.request_id:
                yield f"abort asked for: {message.cause}"
            elif isinstance(message, Stop) and message.request_id == self.request_id:
                yield f"a stop string completed at token {message.num_output_tokens}"
        for entry in record.log:
            if isinstance(entry, StepResult):
                yield from self._first_tokens(entry)

    def _first_tokens(self, result: StepResult) -> Iterator[str]:
        for row, request_id, index in result.joined:
            if request_id == self.request_id:
                yield f"{result.worker} has its output token {index} (step {result.step_id}, row {row})"

    def _decided(self, step: Step, plan: StepPlan | None) -> Iterator[str]:
        record = step.record
        for event in record.events:
            if event.request_id == self.request_id:
                yield from self._event(event, step, plan)
        for new in plan.added if plan else ():
            if new.request_id == self.request_id:
                known, cached = len(new.tokens) // 4, new.num_computed_tokens
                self._account(record.tick.now, "")
                reasons = ", ".join(f"{reason} {seconds:.3f} s" for reason, seconds in self.waited.items())
                self.waited.clear()
                yield (
                    f"admitted on {record.worker}, row {new.row} (step {plan.plan_id if plan else 0}) after "
                    f"{record.tick.now - self.since:.3f} s{f' ({reasons})' if reasons else ''}: {known} tokens known, "
                    f"KV of {cached} there already"
                )

    def _event(self, event: RequestEvent, step: Step, plan: StepPlan | None) -> Iterator[str]:
        if event.kind is EventKind.FINISHED:
            self.is_over = True
            words = f" ({event.message})" if event.message else ""
            yield f"finished: {event.reason}, {event.num_output_tokens} output tokens{words}"
            return
        self.since = step.record.tick.now
        yield (
            f"preempted on {self.place} for lack of {event.reason} with {event.num_output_tokens} output tokens"
            f"{self._takers(step, plan)}"
        )

    def _takers(self, step: Step, plan: StepPlan | None) -> str:
        """Who got blocks in the plan for which it was preempted."""
        lane = step.core.lanes.get(step.record.worker)
        if lane is None or plan is None:
            return ""
        rows = dict.fromkeys(unpack_int32(plan.blocks)[::2])
        takers = [lane.seats[row].request.request_id for row in rows if row in lane.seats]
        return f"; its worker's blocks go to {', '.join(takers)}" if takers else ""

    def _waits(self, step: Step, plan: StepPlan | None) -> Iterator[str]:
        request = step.core.requests.get(self.request_id)
        if request is None or request.seat is not None:
            return
        fenced = self.place and not any(event.request_id == self.request_id for event in step.record.events)
        if fenced:
            self.since = step.record.tick.now
            yield f"{self.place} is lost: it waits again, with {len(request.output)} output tokens"
        found = next(each for each in step.core.diagnostics() if each.request_id == self.request_id)
        is_new = found.reason not in self.waited
        if found.reason != self.reason:
            self._account(step.record.tick.now, found.reason)
        if is_new:
            yield f"waits ({found.reason}): {found.detail}"

    def _account(self, now: float, reason: str) -> None:
        """From now on it waits for another reason, or no more."""
        if self.reason:
            self.waited[self.reason] = self.waited.get(self.reason, 0.0) + now - self.reason_since
        if reason:
            self.waited.setdefault(reason, 0.0)
        self.reason, self.reason_since = reason, now
