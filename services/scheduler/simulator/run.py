"""The simulation: the real core, driven through `apply_tick` in virtual time as the leader drives it.

    trace ──▶ submissions ─┐                 ┌─ plans ──▶ workers (latency model) ─┐
                           ├─▶ leader's turn ┤                                     │
    log ◀─ results ────────┘                 └─ events                             │
      ▲                                                                            │
      └────────────────────────── one hop later ───────────────────────────────────┘

One heap holds what is to happen, by time and then by the order in which it was foreseen: no chance, no clock.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.outcomes import Finished, ScheduledPlan
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.ticks import TickOutcome, apply_tick
from services.scheduler.simulator.figures import Figures
from services.scheduler.simulator.latency import LatencyModel
from services.scheduler.simulator.pool import Seat, WorkerChange, WorkerSpec
from services.scheduler.simulator.report import Report
from services.scheduler.simulator.trace import Trace, TraceRequest, check_trace
from shared.errors import ConfigError
from shared.messages import (
    Abort,
    IntakeMessage,
    LogMessage,
    Submission,
    Submit,
    Tick,
    WorkerDraining,
    WorkerEvent,
    WorkerFenced,
    WorkerJoined,
)

TickObserver = Callable[
    [SchedulerCore, Tick, Sequence[LogMessage], Sequence[IntakeMessage], Mapping[str, Submission], TickOutcome], None
]
"""Sees every tick that decided or took in something: what it was given and what it led to."""


def simulate(
    config: SchedulerConfig,
    workers: Sequence[WorkerSpec],
    trace: Trace,
    latency: LatencyModel | None = None,
    *,
    changes: Iterable[WorkerChange] = (),
    on_tick: TickObserver | None = None,
) -> Report:
    """Serve `trace` on `workers` and report.

    Raises:
        ConfigError: a request or a worker that makes no sense.
    """
    simulation = Simulation(config, workers, trace, latency or LatencyModel(), changes, on_tick)
    simulation.run()
    return simulation.report()


class Simulation:
    """One run."""

    def __init__(
        self,
        config: SchedulerConfig,
        workers: Sequence[WorkerSpec],
        trace: Trace,
        latency: LatencyModel,
        changes: Iterable[WorkerChange] = (),
        on_tick: TickObserver | None = None,
    ) -> None:
        check_trace(trace)
        self.core = SchedulerCore(config)
        self._config, self._latency, self._on_tick = config, latency, on_tick
        self._seats = {spec.name: Seat(spec) for spec in workers}
        if len(self._seats) < len(workers) or not workers:
            raise ConfigError("a simulation needs workers, each with a name of its own")
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_foreseen = 0
        self._log: list[LogMessage] = []
        self._intake: list[IntakeMessage] = []
        self._events: list[WorkerEvent] = []
        self._submissions: dict[str, Submission] = {}
        self._outputs: dict[str, tuple[array[int], int]] = {}
        self._followers: dict[str, list[TraceRequest]] = {}
        self._leader_free = 0.0
        self._turn_is_due = False
        self._touched: dict[str, Seat] = {}
        """Seats whose blocks may have changed since the last look at them."""
        self._num_ticks = 0
        self._figures = Figures(config)
        self._clients = self._figures.clients
        self._foresee_trace(trace)
        for spec in workers:
            self._at(spec.joins_at, self._join, spec.name)
        for change in changes:
            if change.worker not in self._seats:
                raise ConfigError(f"there is no worker {change.worker!r}")
            self._at(change.at, getattr(self, f"_{change.action}"), change.worker)

    def _foresee_trace(self, trace: Trace) -> None:
        for request in trace:
            if request.after:
                self._followers.setdefault(request.after, []).append(request)
            else:
                self._at(request.arrival, self._submit, request)

    def _at(self, when: float, what: Callable[[Any], None], subject: Any) -> None:
        self._num_foreseen += 1
        heappush(self._heap, (when, self._num_foreseen, what, subject))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self._now, _, what, subject = heappop(self._heap)
            what(subject)
        assert not self.core.broken_workers(), "a simulated worker contradicts its plan"

    def report(self) -> Report:
        """After `run`."""
        return self._figures.report(self.core, list(self._seats.values()), num_ticks=self._num_ticks, now=self._now)

    # ------------------------------------------------------------ clients

    def _submit(self, request: TraceRequest) -> None:
        for submission, output in request.submissions():
            request_id = submission.request_id
            self._submissions[request_id] = submission
            self._outputs[request_id] = (output, submission.params.max_tokens)
            self._clients.on_arrival(request_id, len(submission.prompt_tokens) // 4, self._now)
            self._intake.append(Submit(request_id))
            if request.abort_at:
                self._at(self._now + request.abort_at, self._abort, request_id)
        self._wake_for_intake()

    def _abort(self, request_id: str) -> None:
        if request_id in self._submissions:
            self._intake.append(Abort(request_id, "client_disconnect"))
            self._wake_for_intake()

    def _wake_for_intake(self) -> None:
        """As the leader holds it back: while all workers have their plans, new requests could change nothing."""
        if self.core.can_plan or not self.core.lanes:
            self._wake()
        else:
            self._observe()

    # ------------------------------------------------------------ workers come and go

    def _join(self, name: str) -> None:
        seat = self._seats[name]
        if seat.worker is not None:
            raise ConfigError(f"{name} joins at {self._now:g} s, but it is there already")
        seat.join(self._outputs, self._latency, self._now)
        spec = seat.spec
        self._events.append(
            WorkerJoined(name, seat.incarnation, spec.num_blocks, spec.num_cpu_blocks, spec.block_bytes)
        )
        self._wake()

    def _kill(self, name: str) -> None:
        """Nothing more of it, and the supervisor says so at once."""
        seat = self._seats[name]
        if seat.worker is not None:
            self._clients.on_left(seat.worker.yielding(), seat.last_tokens)
            seat.leave(self._now, self.core)
            self._at(self._now + self._latency.hop_s, self._log_arrives, WorkerFenced(name, seat.incarnation, "killed"))

    def _drain(self, name: str) -> None:
        seat = self._seats[name]
        if seat.worker is not None and not seat.draining:
            seat.draining = True
            self._events.append(WorkerDraining(name, seat.incarnation))
            self._wake()

    def _let_drained_leave(self) -> None:
        for seat in self._seats.values():
            if seat.draining and seat.worker is not None:
                lane = self.core.lanes.get(seat.spec.name)
                if lane is not None and lane.is_idle:
                    self._kill(seat.spec.name)

    # ------------------------------------------------------------ steps

    def _begin(self, seat: Seat) -> None:
        """Start the next step, if the worker is free and a plan is there or under way to it."""
        worker = seat.worker
        if worker is None or seat.is_busy or not seat.inbox:
            return
        arrives, plan = seat.inbox.popleft()
        seat.is_busy, seat.began = True, max(self._now, arrives)
        load, gone, admitted = worker.begin(plan)
        self._clients.on_left(gone, seat.last_tokens)
        for admission in admitted:
            self._clients.on_admission(admission, seat.began)
        duration = self._latency.step_s(load, seat.spec.block_bytes)
        self._figures.on_step(load, duration)
        self._at(seat.began + duration, self._end_step, (seat, seat.step))

    def _end_step(self, subject: tuple[Seat, int]) -> None:
        seat, step = subject
        worker = seat.worker
        if worker is None or step != seat.step:
            return  # it died meanwhile
        report = worker.finish()
        seat.step += 1
        seat.is_busy = False
        seat.busy_s += self._now - seat.began
        seat.num_steps += 1
        seat.num_tokens += report.num_continuing + len(report.joined)
        seen = self._now + self._latency.hop_s
        self._clients.on_step(report.joined, report.ended, report.num_continuing, seen, seat.last_tokens)
        seat.last_tokens = seen
        self._touched[seat.spec.name] = seat
        self._at(seen, self._log_arrives, report.result)
        self._begin(seat)

    def _log_arrives(self, message: LogMessage) -> None:
        self._log.append(message)
        self._wake()

    # ------------------------------------------------------------ the leader

    def _wake(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._at(max(self._now, self._leader_free), self._turn, None)

    def _turn(self, _: None) -> None:
        """The leader's turn: one tick with all inputs, then ticks without, until no plan is due."""
        self._turn_is_due = False
        log, self._log = self._log, []
        intake, self._intake = self._intake, []
        events, self._events = self._events, []
        submissions = {m.request_id: self._submissions[m.request_id] for m in intake if isinstance(m, Submit)}
        outcome = self._tick(tuple(events), log, intake, submissions)
        num_plans = 0
        while outcome.plan is not None:
            num_plans += 1
            self._send(outcome.plan, self._now + num_plans * self._latency.leader_s + self._latency.hop_s)
            if not self.core.can_plan:
                break
            outcome = self._tick((), (), (), {})
        self._leader_free = self._now + max(num_plans, 1) * self._latency.leader_s
        self._let_drained_leave()
        self._observe()

    def _observe(self) -> None:
        num_held = sum(isinstance(message, Submit) for message in self._intake)
        self._figures.observe(self.core, self._touched.values(), num_held, self._now)
        self._touched.clear()

    def _tick(
        self,
        events: tuple[WorkerEvent, ...],
        log: Sequence[LogMessage],
        intake: Sequence[IntakeMessage],
        submissions: Mapping[str, Submission],
    ) -> TickOutcome:
        number = self._num_ticks + 1
        tick = Tick(number, f"{number}-0", f"{number}-0", self._now, events)
        outcome = apply_tick(self.core, tick, log, intake, submissions)
        if not outcome.is_empty or events or log or intake:
            self._num_ticks = number
            if self._on_tick is not None:
                self._on_tick(self.core, tick, log, intake, submissions, outcome)
        for finished in outcome.finished:
            self._finish(finished)
        return outcome

    def _send(self, planned: ScheduledPlan, arrives: float) -> None:
        seat = self._seats[planned.worker]
        if seat.worker is not None and seat.incarnation == planned.incarnation:
            self._touched[planned.worker] = seat
            seat.inbox.append((arrives, planned.plan))
            self._begin(seat)

    def _finish(self, finished: Finished) -> None:
        del self._submissions[finished.request_id]
        for request in self._followers.pop(finished.request_id, ()):
            self._at(self._now + request.arrival, self._submit, request)
