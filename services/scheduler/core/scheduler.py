"""The scheduler core: every request of a pool, every block of its workers. See the package's docstring for the parts.

There is no prefill and no decode phase: each request has computed tokens that catch up with its known tokens under a
budget of tokens per pass. Running requests go first, then waiting ones in the policy's order.
"""

from collections.abc import Sequence
from operator import attrgetter

from services.scheduler.core import draining, logprobs, planning, swap
from services.scheduler.core.admission import EmptyLanes
from services.scheduler.core.beams import Result
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.contradiction import contradicts
from services.scheduler.core.counters import Counters
from services.scheduler.core.diagnostics import Diagnosis, diagnose
from services.scheduler.core.forks import Groups
from services.scheduler.core.integrity import check_integrity
from services.scheduler.core.known_worker import KnownWorker, forget_absent
from services.scheduler.core.lane import Lane
from services.scheduler.core.outcomes import Finished, LiveOutput, ScheduledPlan, SchedulerStats
from services.scheduler.core.policies import make_policy
from services.scheduler.core.queue import WaitingQueue
from services.scheduler.core.refusals import refusal
from services.scheduler.core.report import live_output, stats_of
from services.scheduler.core.request import Request, RequestState, Signal
from services.scheduler.core.suspects import blame
from shared.messages import (
    DEADLINE_CAUSES,
    FINISH_REASONS,
    WORKERS_DIED,
    EndReason,
    EventKind,
    Final,
    FinishReason,
    RequestEvent,
    StepResult,
    Submission,
    WorkerDraining,
    WorkerJoined,
)
from shared.packing import pack_int32

MAX_REMEMBERED_ENDS = 256
"""Ended requests whose id is remembered, so that a doubled `Submit` is not taken for a new one."""


class SchedulerCore:
    """The state machine of one pool."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = make_policy(config)
        self.now = 0.0
        """Of the present tick, seconds."""
        self.requests: dict[str, Request] = {}
        self.groups = Groups()
        self.waiting = WaitingQueue(self.policy)
        self.lanes: dict[str, Lane] = {}
        self.known_workers: dict[str, KnownWorker] = {}
        self.counters = Counters()
        self.finished_by_reason = dict.fromkeys(FinishReason, 0)
        self.ended_ids: dict[str, None] = {}
        """The last ones, oldest first."""
        self.num_arrivals = 0
        self.num_joins = 0
        self.times_passed_over = 0
        """Plans in a row that left the first waiting request to another worker."""
        self._awaiting_stop: dict[str, Request] = {}
        self._events: list[RequestEvent] = []
        self._finished: list[Finished] = []
        self.newly_cached: list[tuple[str, int]] = []
        """For `take_cached`."""
        self.newly_admitted: list[tuple[int, float]] = []
        """For `take_waits`."""

    # ------------------------------------------------------------ requests come and go

    def add_request(
        self,
        submission: Submission,
        output: Sequence[int] = (),
        end_reason: EndReason | None = None,
        num_cached_tokens: int = -1,
        token_logprobs: Sequence[float] = (),
        fingerprint: str = "",
    ) -> None:
        """Queue a request. After a cold start: `output` is what it had committed, `end_reason` how a worker ended it,
        `num_cached_tokens` what readers were told of its first admission, `token_logprobs` those of `output`,
        `fingerprint` the numerics by which it was computed.

        A request that can never fit ends at once as rejected. An id that is live or ended lately is ignored.
        """
        if submission.request_id in self.requests or submission.request_id in self.ended_ids:
            self.counters.ignored += 1
            return
        request = Request(submission, arrival=self.num_arrivals, num_cached_tokens=num_cached_tokens)
        request.arrived_at = self.now
        request.fingerprint = fingerprint
        self.num_arrivals += 1
        request.output.extend(output)
        request.logprobs.extend(token_logprobs)
        self.requests[request.request_id] = request
        self.groups.add(request)
        self.policy.on_live(request)
        self.waiting.push(request)
        if end_reason is None and output and len(output) >= submission.params.max_tokens:
            end_reason = EndReason.LENGTH
        if end_reason is not None:
            self._finish(request, FINISH_REASONS[end_reason], end_reason=end_reason)
        else:
            self._reject_if_never(request)

    def abort_request(self, request_id: str, cause: str) -> None:
        """End a request that nobody waits for. An unknown id is ignored and counted."""
        request = self._live(request_id)
        if request is not None:
            reason = FinishReason.TIMEOUT if cause in DEADLINE_CAUSES else FinishReason.ABORT
            self._finish(request, reason, message=cause)

    def stop_request(self, request_id: str, num_output_tokens: int) -> None:
        """End a request after `num_output_tokens` tokens, now or when that many are committed."""
        request = self._live(request_id)
        if request is not None and request.submission.params.beam_width:
            self.counters.ignored += 1  # nobody has seen a token of it
        elif request is not None:
            earlier = request.stop_at
            request.stop_at = num_output_tokens if earlier is None else min(earlier, num_output_tokens)
            self._awaiting_stop[request_id] = request
            self._stop_if_due(request)

    def ignore_message(self) -> None:
        """Count a message that stands for nothing."""
        self.counters.ignored += 1

    def resume_stops(self) -> None:
        """Watch again for requests with `stop_at`, after they were restored."""
        self._awaiting_stop = {id: request for id, request in self.requests.items() if request.stop_at is not None}

    def _live(self, request_id: str) -> Request | None:
        request = self.requests.get(request_id)
        if request is None:
            self.counters.ignored += 1
        return request

    # ------------------------------------------------------------ workers come and go

    def on_worker_joined(self, joined: WorkerJoined) -> None:
        """A worker incarnation takes plans from now on. One that is fenced or known already is ignored and counted."""
        known = self.known_workers.setdefault(joined.worker, KnownWorker())
        lane = self.lanes.get(joined.worker)
        if joined.incarnation <= known.fenced or (lane is not None and joined.incarnation <= lane.incarnation):
            self.counters.ignored += 1
            return
        if lane is not None:
            self.on_worker_lost(lane.worker, lane.incarnation)
        known.num_blocks = joined.num_blocks
        pool = self.config.make_pool(joined.num_blocks, joined.num_cpu_blocks)
        self.lanes[joined.worker] = Lane(
            joined.worker,
            joined.incarnation,
            self.num_joins,
            pool,
            self.config,
            self.policy,
            joined.block_bytes,
            joined.fingerprint,
        )
        self.num_joins += 1
        forget_absent(self.known_workers, self.lanes)
        swap.leave_draining_lanes(self)
        self._reject_what_never_fits()

    def on_worker_draining(self, event: WorkerDraining) -> None:
        """Place nothing more on a worker; what runs there moves to others, and runs on until they have room."""
        lane = self.lanes.get(event.worker)
        if lane is None or lane.incarnation != event.incarnation:
            self.counters.ignored += 1
            return
        lane.draining = True
        swap.leave_draining_lanes(self)

    def on_worker_lost(self, worker: str, incarnation: int) -> None:
        """The incarnation is fenced: its requests wait again, with every token it published.

        Fencing one that never joined is normal.
        """
        known = self.known_workers.pop(worker, None) or KnownWorker()
        self.known_workers[worker] = known  # the last of those that died
        known.fenced = max(known.fenced, incarnation)
        lane = self.lanes.get(worker)
        if lane is None or lane.incarnation > incarnation:
            return
        del self.lanes[worker]
        condemned = blame(lane)
        for seat in lane.seats.values():
            lane.collect(seat)
            lane.tell_policy_left(seat)
            seat.request.seat = None
            seat.request.apply(Signal.REQUEUE)
            self.waiting.push(seat.request)
            self.counters.requeues += 1
        swap.lose_copies(self, lane)
        for request in condemned:
            self._finish(request, FinishReason.ERROR, message=WORKERS_DIED)
        if lane.draining:
            known.num_blocks = 0
            self._reject_what_never_fits()

    # ------------------------------------------------------------ results

    def update_from_result(self, result: StepResult) -> None:
        """Commit one step. Late, doubled or of another incarnation: ignored and counted.

        One that contradicts its plan, or comes where another is missing, is counted too, and the worker is `broken`.
        """
        lane = self.lanes.get(result.worker)
        if lane is None or lane.incarnation != result.incarnation or lane.broken or result.step_id <= lane.answered:
            self.counters.ignored += 1
            return
        if result.step_id != lane.answered + 1 or not lane.in_flight or contradicts(lane, result):
            lane.broken = True
            self.counters.ignored += 1
            return
        for request, reason, results in lane.commit(result):
            message = "the worker could not compute this request" if reason is EndReason.ERROR else ""
            self._finish(request, FINISH_REASONS[reason], end_reason=reason, message=message, results=results)
        if self._awaiting_stop:
            for request in sorted(self._awaiting_stop.values(), key=attrgetter("arrival")):
                self._stop_if_due(request)

    def broken_workers(self) -> list[tuple[str, int]]:
        """(worker, incarnation) whose results contradict its plans. They get no more plans and should be fenced."""
        return [(lane.worker, lane.incarnation) for lane in self.lanes.values() if lane.broken]

    def drained_workers(self) -> list[tuple[str, int]]:
        """(worker, incarnation) of draining workers on which nothing is left; they should be fenced, and may go."""
        return draining.drained_workers(self)

    # ------------------------------------------------------------ planning

    @property
    def can_plan(self) -> bool:
        """Whether new intake could lead to a plan now: some worker has fewer plans in flight than it may have."""
        return any(lane.can_plan for lane in self.lanes.values())

    def schedule(self, now: float) -> ScheduledPlan | None:
        """The next plan that is due, for the worker with the fewest plans in flight, at time `now` (seconds).

        None if no plan is due. Without a plan and without an event the state is unchanged.
        """
        self.now = now
        empty_lanes = EmptyLanes(self)
        for depth in range(self.config.plan_ahead):
            for lane in self.lanes.values():
                if len(lane.in_flight) == depth and lane.can_plan:
                    if lane.is_empty and not empty_lanes.may_have_plan(lane):
                        continue
                    plan = planning.plan_for(self, lane)
                    if plan is not None:
                        return ScheduledPlan(lane.worker, lane.incarnation, plan)
        return None

    # ------------------------------------------------------------ endings

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        end_reason: int = 0,
        message: str = "",
        results: Sequence[Result] = (),
    ) -> None:
        """End a live request, wherever it is. A stop string that completed before the end wins over it.

        `results` are those of a beam search: its output is the first one's.
        """
        if request.seat is not None:
            request.seat.lane.drop(request.seat)
        elif request.swapped is not None:
            swap.drop_copy(request)
        elif request.state is RequestState.WAITING:
            self.waiting.remove(request)
            self.leave_queue(request)
        if results:
            request.output.extend(results[0].tokens)
        num_output_tokens = len(request.output)
        if request.stop_at is not None and request.stop_at <= num_output_tokens:
            reason, end_reason, message, num_output_tokens = FinishReason.STOP, 0, "", request.stop_at
        request.apply(Signal.FINISH)
        del self.requests[request.request_id]
        self.groups.remove(request)
        self.policy.on_ended(request)
        self._awaiting_stop.pop(request.request_id, None)
        self._remember_end(request.request_id)
        self.finished_by_reason[reason] += 1
        final = Final(
            reason=reason,
            num_output_tokens=num_output_tokens,
            end_reason=int(end_reason),
            message=message,
            num_cached_tokens=max(0, request.num_cached_tokens),
            cumulative_logprob=results[0].logprob if results else logprobs.cumulative(request, num_output_tokens),
            hypotheses=tuple(result.as_hypothesis() for result in results),
            num_numerics_switches=request.num_numerics_switches,
        )
        output = pack_int32(request.output[:num_output_tokens])
        scores = logprobs.packed(request, num_output_tokens)
        generated = max(len(request.output), num_output_tokens)
        self._finished.append(Finished(request.request_id, final, output, scores, request.submission, generated))
        self.emit(request, EventKind.FINISHED, num_output_tokens, reason, message)

    def _remember_end(self, request_id: str) -> None:
        self.ended_ids[request_id] = None
        if len(self.ended_ids) > MAX_REMEMBERED_ENDS:
            del self.ended_ids[next(iter(self.ended_ids))]

    def _stop_if_due(self, request: Request) -> None:
        assert request.stop_at is not None
        if self.num_committed(request) >= request.stop_at:
            self._finish(request, FinishReason.STOP)

    def _reject_what_never_fits(self) -> None:
        for request in list(self.waiting):
            self._reject_if_never(request)

    def _reject_if_never(self, request: Request) -> None:
        message = refusal(self, request)
        if message:
            self._finish(request, FinishReason.REJECTED, message=message)

    def leave_queue(self, request: Request) -> None:
        """It was admitted, or ended: it no longer counts against the queue's caps."""
        if not request.has_left_queue:
            request.has_left_queue = True
            self.counters.left_requests += 1
            self.counters.left_tokens += request.num_prompt_tokens

    def emit(
        self, request: Request, kind: EventKind, num_output_tokens: int, reason: str = "", message: str = ""
    ) -> None:
        """A decision that readers of the log must know."""
        self._events.append(RequestEvent(request.request_id, kind, num_output_tokens, str(reason), message))

    def take_events(self) -> list[RequestEvent]:
        """Decisions since the last call, in order."""
        events, self._events = self._events, []
        return events

    def take_finished(self) -> list[Finished]:
        """Requests that ended since the last call, in order."""
        finished, self._finished = self._finished, []
        return finished

    def take_cached(self) -> list[tuple[str, int]]:
        """(request, cached prompt tokens) of those that were first admitted since the last call, if there were any."""
        cached, self.newly_cached = self.newly_cached, []
        return cached

    def take_waits(self) -> list[tuple[int, float]]:
        """(priority, seconds in queue) of those that were first admitted since the last call."""
        waits, self.newly_admitted = self.newly_admitted, []
        return waits

    # ------------------------------------------------------------ questions

    def largest_request_tokens(self) -> int:
        """Most tokens, prompt plus `max_tokens`, that are not rejected; `max_model_len` before any worker joined."""
        largest = self.largest_worker_blocks() * self.config.block_size
        return min(self.config.max_model_len, largest) or self.config.max_model_len

    def largest_worker_blocks(self) -> int:
        """KV blocks of the largest worker; 0 before any joined."""
        return max((known.num_blocks for known in self.known_workers.values()), default=0)

    def num_committed(self, request: Request) -> int:
        """Output tokens of a live request that are committed."""
        seat = request.seat
        return len(request.output) if seat is None else seat.lane.num_committed(seat)

    def collect(self, request: Request) -> None:
        """Bring `request.output` up to date; changes nothing that a plan depends on."""
        if request.seat is not None:
            request.seat.lane.collect(request.seat)

    def live_outputs(self) -> list[LiveOutput]:
        """Every live request's committed output, for folding into its record."""
        return [live_output(self, request) for request in self.requests.values()]

    def stats(self) -> SchedulerStats:
        return stats_of(self)

    @property
    def is_idle(self) -> bool:
        """No live request, no plan in flight, no row in use."""
        return not self.requests and all(lane.is_idle for lane in self.lanes.values())

    def diagnostics(self) -> list[Diagnosis]:
        """Where every live request is and what it waits for."""
        return diagnose(self)

    def check_integrity(self) -> None:
        """Verify every invariant; for tests and for idle moments, its cost is the whole state.

        Raises:
            AssertionError: one does not hold.
        """
        check_integrity(self)
