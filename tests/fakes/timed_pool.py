"""The scheduler core with one worker in virtual time: a step takes a fixed time and some more per token. No model."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import restore, take_snapshot
from services.scheduler.core.ticks import apply_tick
from shared.messages import (
    EndReason,
    IntakeMessage,
    LogMessage,
    StepPlan,
    StepResult,
    Submission,
    Submit,
    Tick,
    WorkerEvent,
    WorkerJoined,
)
from shared.packing import NO_TOKEN, pack_int32

STEP_S = 0.008
TOKEN_S = 0.0002
TOKEN = 7


class Arrival(NamedTuple):
    """A request comes at this time (seconds)."""

    at: float
    submission: Submission


@dataclass(slots=True)
class _Row:
    submission: Submission
    num_left: int
    """Known tokens that are not computed."""
    num_output: int
    has_joined: bool = False


class TimedPool:
    """`run` plays arrivals, and can be called again to go on; the dictionaries say by request id what happened when."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self.core = SchedulerCore(config)
        self.config = config
        self.now = 0.0
        self.first_token: dict[str, float] = {}
        self.admitted: dict[str, float] = {}
        self.served: Counter[str] = Counter()
        """By tenant: prompt tokens computed and output tokens committed."""
        self.records: dict[str, Submission] = {}
        self._coming: deque[Arrival] = deque()
        self._rows: dict[int, _Row] = {}
        self._inbox: deque[StepPlan] = deque()
        self._busy_until: float | None = None
        self._num_ticks = 0
        self._tick([], [], (WorkerJoined("w", 1, num_blocks),))

    def run(self, arrivals: Iterable[Arrival], until: float = float("inf"), *, restart_every: int = 0) -> None:
        """Play until time `until`, or until everything has ended. `restart_every` events the core is restored."""
        coming = self._coming = deque(sorted([*self._coming, *arrivals], key=lambda arrival: arrival.at))
        num_events = 0
        while coming or self._busy_until is not None:
            next_end = float("inf") if self._busy_until is None else self._busy_until
            event_at = min(next_end, coming[0].at if coming else next_end)
            if event_at > until:
                return
            self.now = max(self.now, event_at)
            log: list[LogMessage] = [self._end_step()] if next_end <= self.now else []
            intake: list[IntakeMessage] = []
            while coming and coming[0].at <= self.now:
                submission = coming.popleft().submission
                self.records[submission.request_id] = submission
                intake.append(Submit(submission.request_id))
            self._tick(log, intake)
            num_events += 1
            if restart_every and num_events % restart_every == 0:
                self.core = restore(take_snapshot(self.core), self.config, self.records)

    def _tick(self, log: list[LogMessage], intake: list[IntakeMessage], events: tuple[WorkerEvent, ...] = ()) -> None:
        while True:
            self._num_ticks += 1
            name = f"{self._num_ticks}-0"
            tick = Tick(self._num_ticks, name, name, self.now, events)
            outcome = apply_tick(self.core, tick, log, intake, self.records)
            log, intake, events = [], [], ()
            if outcome.plan is not None:
                self._inbox.append(outcome.plan.plan)
                for new in outcome.plan.plan.added:
                    self.admitted.setdefault(new.request_id, self.now)
            if outcome.is_empty:
                break
        self._begin_step()

    def _begin_step(self) -> None:
        if self._busy_until is not None or not self._inbox:
            return
        plan = self._inbox[0]
        num_decode = sum(row.has_joined for number, row in self._rows.items() if number not in plan.dropped)
        num_tokens = num_decode + sum(num_scheduled for _, num_scheduled in plan.chunks)
        self._busy_until = self.now + STEP_S + TOKEN_S * num_tokens

    def _end_step(self) -> StepResult:
        plan = self._inbox.popleft()
        self._busy_until = None
        for number in plan.dropped:
            self._rows.pop(number, None)
        for new in plan.added:
            known = len(new.tokens) // 4
            submission = self.records[new.request_id]
            self._rows[new.row] = _Row(submission, known - new.num_computed_tokens, known - new.num_prompt_tokens)
        yielding = [number for number, row in self._rows.items() if row.has_joined]
        for number, num_scheduled in plan.chunks:
            if number in self._rows:
                row = self._rows[number]
                row.num_left -= num_scheduled
                self.served[row.submission.tenant] += num_scheduled
                yielding += [number] if not row.num_left else []
        return self._yield(plan.plan_id, sorted(yielding))

    def _yield(self, step_id: int, yielding: list[int]) -> StepResult:
        tokens = [NO_TOKEN] * (max(yielding, default=-1) + 1)
        joined, ended = [], []
        for number in yielding:
            row = self._rows[number]
            tokens[number] = TOKEN
            self.served[row.submission.tenant] += 1
            self.first_token.setdefault(row.submission.request_id, self.now)
            if not row.has_joined:
                joined.append((number, row.submission.request_id, row.num_output))
                row.has_joined = True
            row.num_output += 1
            if row.num_output == row.submission.params.max_tokens:
                ended.append((number, int(EndReason.LENGTH)))
                del self._rows[number]
        return StepResult("w", 1, step_id, pack_int32(tokens), tuple(joined), ended=tuple(ended))


@dataclass(slots=True)
class Names:
    """Numbers the requests of a tenant."""

    tenant: str
    count: int = field(default=0)

    def next(self) -> str:
        self.count += 1
        return f"{self.tenant}{self.count}"
