"""The leader's turn: read both streams once, apply ticks to the core, commit them in one pipeline, then what is due.

    read ──▶ inputs ──▶ tick n (inputs, first plan) ──▶ tick n+1 (next plan) … ──▶ commit, next read ──▶ chores
      ▲                                                                                  │                 │
      └───────────────────────────── what Redis found meanwhile ◀────────────────────────┴─────────────────┘

The next read is sent in one piece with the commit: one call of the system and one waking of Redis for both, and the
answer is there, or Redis waits for news, by the time it is wanted.

Inputs that were read but not yet applied stay in the leader, and commits whose outcome is unknown stay in the
committer, so that a turn which Redis interrupts is simply repeated.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import redis

from services.scheduler.core.ticks import TickOutcome, apply_tick
from services.scheduler.recording.recorder import Recorder
from services.scheduler.service import logs
from services.scheduler.service.chores import Chores, Clock, Every
from services.scheduler.service.committer import Committer, tick_operations
from services.scheduler.service.folder import Folder
from services.scheduler.service.inbox import PAGE, Batch, Inbox
from services.scheduler.service.leadership import Leadership
from services.scheduler.service.position import Position
from services.scheduler.service.queue_counts import LimitsWriter
from services.scheduler.service.saving import is_much_unsaved, save_operations
from services.scheduler.service.step_deadlines import StepDeadlines
from services.scheduler.service.submissions import load_submissions
from services.scheduler.service.trimmer import Incarnation, Saved
from services.scheduler.service.workers import WorkerDirectory
from services.scheduler.settings import Settings
from shared.channel import Command
from shared.errors import Fenced
from shared.keys import Keys
from shared.messages import (
    WORKERS_DIED,
    IntakeMessage,
    LogMessage,
    ProcessDied,
    StepResult,
    Submission,
    Submit,
    Tick,
    TickEntry,
    WorkerEvent,
    WorkerFenced,
)
from shared.scripts import Operation
from shared.streams import START

WORKERS_INTERVAL_S = 0.25
MAX_BLOCK_S = 0.25
"""Longest wait for news: what is due at intervals needs the loop."""
MAX_HOLD_S = 1.0
"""Intake that could change nothing is held back no longer than this: a hung worker must not delay an abort for ever."""


@dataclass(slots=True)
class _Inputs:
    """Read but not applied."""

    log: list[LogMessage] = field(default_factory=list)
    """Without `TickEntry`: those are the leader's own."""
    intake: list[IntakeMessage] = field(default_factory=list)
    held_since: float = 0.0
    events: list[WorkerEvent] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Written:
    """A tick of this turn and what its commit does."""

    tick: int
    operations: list[Operation]


@dataclass(slots=True)
class LeaderParts:
    """What a leader is composed of; see `service.py`."""

    client: redis.Redis
    keys: Keys
    settings: Settings
    leadership: Leadership
    position: Position
    inbox: Inbox
    committer: Committer
    workers: WorkerDirectory
    limits: LimitsWriter
    backlog: list[IntakeMessage]
    """Intake messages from before the position that concern its requests (after a cold start)."""
    old_streams: list[Incarnation]
    """Plan streams that earlier leaders may have left."""
    recorder: Recorder | None = None


class Leader:
    """Leads until `Fenced` is raised. One thread calls it."""

    def __init__(self, parts: LeaderParts, *, wall: Clock = time.time, clock: Clock = time.monotonic) -> None:
        settings = parts.settings
        self._client, self._keys, self._settings = parts.client, parts.keys, settings
        self._leadership, self._position, self._inbox = parts.leadership, parts.position, parts.inbox
        self._committer, self._workers = parts.committer, parts.workers
        self._recorder = parts.recorder
        self._wall, self._clock = wall, clock
        self._inputs = _Inputs(intake=parts.backlog)
        self._folder = Folder()
        self._chores = Chores(parts.client, parts.keys, settings, parts.limits, parts.position.core, wall, clock)
        self._answered: dict[Incarnation, int] = {}
        self._ended = dict.fromkeys(parts.old_streams)
        self._saving: Saved | None = None
        self._folded_to = START
        self._is_unsaved = True
        self._is_unfolded = True
        self._log_is_drained = False
        self._is_new = True
        self._steps = StepDeadlines(settings.step_deadline_s, clock)
        self._look = Every(WORKERS_INTERVAL_S, clock)
        self._save = Every(settings.snapshot_interval_s, clock)
        self._fold = Every(settings.fold_interval_s, clock)

    @property
    def position(self) -> Position:
        """Where this leader stands; committed up to the last turn."""
        return self._position

    # ------------------------------------------------------------ the turn

    def turn(self, block_s: float = 0.0) -> bool:
        """Read, decide, commit. Waits up to `block_s` seconds for news. Answers whether there was any.

        Raises:
            Fenced: somebody else leads; drop this leader.
            RedisFailure: Redis did not answer; call again.
        """
        self._leadership.beat()
        if self._leadership.lost:
            raise Fenced("the leader's lease is another instance's")
        self._commit()
        batch = self._inbox.read(0.0 if self._inbox.is_asked else min(block_s, self._longest_wait()))
        self._take(batch)
        self._look_at_workers()
        worked = self._tick()
        self._commit([self._inbox.question(min(block_s, self._longest_wait()))] if block_s else ())
        self._chores.do(self._position, epoch=self._leadership.epoch, num_poisoned=self._inbox.num_poisoned)
        return worked or bool(batch.log or batch.intake)

    def run_until_idle(self, max_turns: int = 1000) -> int:
        """Turn without waiting until nothing happens; the number of turns. For tests."""
        for turn in range(max_turns):
            if not self.turn():
                return turn
        raise RuntimeError(f"not idle after {max_turns} turns")

    def finish(self) -> None:
        """Save the position, so that a successor starts where this leader stopped.

        Raises:
            Fenced, RedisFailure: as `turn`.
        """
        self._commit()
        self._save.hurry()
        self._fold.hurry()
        self._tick()
        self._commit()

    def _longest_wait(self) -> float:
        inputs = self._inputs
        if self._is_new or inputs.log or inputs.events or inputs.deaths:
            return 0.0
        waits = [MAX_BLOCK_S, self._look.wait_s]
        if self._is_unsaved:
            waits.append(self._save.wait_s)
        if self._is_unfolded:
            waits.append(self._fold.wait_s)
        return min(waits)

    # ------------------------------------------------------------ inputs

    def _take(self, batch: Batch) -> None:
        """Note what was read."""
        inputs = self._inputs
        if batch.num_log_entries < PAGE:
            self._log_is_drained = True
        if batch.num_log_entries:
            self._chores.trimmer.on_read(self._inbox.log_id, batch.num_log_bytes)
        for entry in batch.log:
            if isinstance(entry, TickEntry):
                continue
            inputs.log.append(entry)
            if isinstance(entry, StepResult):
                self._answered[Incarnation(entry.worker, entry.incarnation)] = entry.step_id
            else:
                self._take_fence(entry)
        for message in batch.intake:
            if isinstance(message, ProcessDied):
                inputs.deaths.append(message.instance)
            else:
                if not inputs.intake:
                    inputs.held_since = self._clock()
                inputs.intake.append(message)

    def _take_fence(self, entry: WorkerFenced) -> None:
        self._workers.on_fenced(entry)
        self._look.hurry()
        incarnation = Incarnation(entry.worker, entry.incarnation)
        self._answered.pop(incarnation, None)
        self._ended[incarnation] = None

    def _look_at_workers(self) -> None:
        """Fence and admit. Only once the log is read to its end: see `WorkerDirectory.poll`."""
        if not self._log_is_drained:
            return
        while self._inputs.deaths:
            self._workers.on_died(self._inputs.deaths[0])
            del self._inputs.deaths[0]
        if self._look.is_due():
            for worker, incarnation in self._position.core.broken_workers():
                self._workers.on_broken(worker, incarnation)
            for worker, incarnation in self._position.core.drained_workers():
                self._workers.on_drained(worker, incarnation)
            for worker, incarnation in self._steps.overdue(self._position.core, self._answered):
                self._workers.on_overdue(worker, incarnation)
            self._inputs.events += self._workers.poll()
            self._look.done()

    def _holds_intake(self) -> bool:
        """New requests could change nothing: every worker has its plans, and no result has come."""
        inputs, core = self._inputs, self._position.core
        if inputs.log or inputs.events or core.can_plan or not core.lanes:
            return False
        return self._clock() - inputs.held_since < MAX_HOLD_S

    # ------------------------------------------------------------ ticks

    def _tick(self) -> bool:
        """Apply what is there, plan for every worker that can take a plan, save if due; whether there was a tick."""
        inputs = self._inputs
        intake = [] if self._holds_intake() else inputs.intake
        submissions = load_submissions(self._client, self._keys, intake)
        # From here on nothing can fail: what is applied will be committed.
        ticks: list[_Written] = []
        if inputs.log or intake or inputs.events:
            self._chores.limits.count_lost(_num_submits(intake) - len(submissions))
            more = self._apply_inputs(ticks, intake, submissions)
        else:
            more = self._is_new  # an earlier leader may have ended between two plans of a turn
        self._is_new = False
        while more:
            more = self._plan_further(ticks)
        if self._must_save(bool(ticks)):
            if not ticks:
                self._apply(ticks, self._next_tick(()), (), (), {})
            ticks[-1].operations.extend(self._save_operations())
        for written in ticks:
            self._committer.add(written.tick, written.operations)
        return bool(ticks)

    def _apply_inputs(
        self, ticks: list[_Written], intake: list[IntakeMessage], submissions: Mapping[str, Submission]
    ) -> bool:
        """The tick that takes the inputs; whether it led to a plan."""
        inputs = self._inputs
        log, events = inputs.log, tuple(inputs.events)
        if intake is inputs.intake:
            inputs.intake = []
        inputs.log, inputs.events = [], []
        self._is_unfolded |= bool(log)
        self._chores.deadlines.add(submissions.values())
        return self._apply(ticks, self._next_tick(events), log, intake, submissions).plan is not None

    def _plan_further(self, ticks: list[_Written]) -> bool:
        """One more plan, if one is due; whether it was. An empty tick changed nothing and is forgotten."""
        if not self._position.core.can_plan:
            return False
        return self._apply(ticks, self._next_tick(()), (), (), {}, unless_empty=True).plan is not None

    def _next_tick(self, events: tuple[WorkerEvent, ...]) -> Tick:
        position, inbox = self._position, self._inbox
        return Tick(
            number=position.tick + 1,
            intake_id=position.intake_id if self._inputs.intake else inbox.intake_id,
            log_id=inbox.log_id,
            now=max(position.now, self._wall()),
            events=events,
        )

    def _apply(
        self,
        ticks: list[_Written],
        tick: Tick,
        log: Sequence[LogMessage],
        intake: Sequence[IntakeMessage],
        submissions: Mapping[str, Submission],
        *,
        unless_empty: bool = False,
    ) -> TickOutcome:
        position = self._position
        outcome = apply_tick(position.core, tick, log, intake, submissions)
        self._chores.queue_times.count(outcome.waits)
        for ended in outcome.finished:
            if ended.final.message == WORKERS_DIED:
                logs.warning("request_condemned", request=ended.request_id)
        if not (unless_empty and outcome.is_empty):
            position.tick, position.now = tick.number, tick.now
            position.intake_id, position.log_id = tick.intake_id, tick.log_id
            operations = tick_operations(self._keys, tick, outcome, record_ttl_s=self._settings.record_ttl_s)
            ticks.append(_Written(tick.number, operations))
            self._is_unsaved = True
            if self._recorder is not None:
                self._recorder.on_tick(position.core, tick, log, intake, submissions, outcome)
        return outcome

    # ------------------------------------------------------------ saving

    def _must_save(self, has_tick: bool) -> bool:
        """A snapshot rides in a tick; without one, a tick is made for it, so that it is never old."""
        due = (has_tick or self._is_unsaved) and self._save.is_due()
        if due or (self._is_unfolded and self._fold.is_due()):
            return True
        return has_tick and is_much_unsaved(self._position.core)

    def _save_operations(self) -> list[Operation]:
        position = self._position
        operations = save_operations(self._keys, position)
        if self._is_unfolded and self._fold.is_due():
            operations += self._folder.operations(self._keys, position.core.live_outputs(), position.log_id)
            self._folded_to, self._is_unfolded = position.log_id, False
            self._fold.done()
        self._saving = Saved(
            log_id=position.log_id,
            intake_id=position.intake_id,
            answered=dict(self._answered),
            ended=tuple(self._ended),
            cached=tuple(Incarnation(*incarnation) for incarnation in position.blocks_saved),
        )
        self._ended.clear()
        self._is_unsaved = False
        self._save.done()
        return operations

    def _commit(self, then: Sequence[Command] = ()) -> None:
        self._committer.flush(then)
        if self._recorder is not None:
            self._recorder.on_commit(hurry=self._saving is not None)
        if self._saving is not None:
            self._chores.trimmer.on_saved(self._saving)
            self._chores.trimmer.on_folded(self._folded_to)
            self._saving = None


def _num_submits(intake: Sequence[IntakeMessage]) -> int:
    return len({message.request_id for message in intake if isinstance(message, Submit)})
