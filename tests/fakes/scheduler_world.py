"""The scheduler core in a small world of content workers, readers and a step log, in which everything may go wrong.

The world judges the core by what crosses the wire (plans, results, events), with its own book-keeping; the core's
internals are checked by `check_integrity`. Everything is deterministic: the same calls give the same `digest`.
"""

import hashlib
import itertools
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cpu_tier import SwappedOut
from services.scheduler.core.lane import Lane
from services.scheduler.core.outcomes import Finished
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import (
    Incarnation,
    read_core,
    restore_core,
    save_changed_blocks,
    save_core,
    take_snapshot,
)
from services.scheduler.core.ticks import TickOutcome, apply_tick
from shared.messages import (
    FINISH_REASONS,
    Abort,
    BeamRow,
    CopyKind,
    EndReason,
    EventKind,
    FinishReason,
    IntakeMessage,
    LogMessage,
    NewRow,
    RequestEvent,
    StepPlan,
    StepResult,
    Stop,
    Submission,
    Submit,
    Tick,
    TickEntry,
    WorkerDraining,
    WorkerEvent,
    WorkerFenced,
    WorkerJoined,
    encode,
)
from shared.packing import pack_int32, unpack_float32, unpack_int32
from shared.sampling import SamplingParams
from shared.step_log import StepLogFollower
from tests.fakes.content_worker import ContentWorker, reference_beams, reference_logprob, reference_output

PREFILL_RATE = 100.0
"""Tokens per second, as workers say."""
BLOCK_BYTES = 64


def make_submission(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
    tenant: str = "",
    priority: int = 0,
    cache_salt: str = "",
    group: str = "",
    **params: object,
) -> Submission:
    """A record as a gateway would write it; `params` are further `SamplingParams`."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, stop_token_ids=stop_token_ids, **params)  # type: ignore[arg-type]
    return Submission(
        request_id,
        "content",
        "completion",
        0.0,
        pack_int32(prompt),
        sampling,
        tenant=tenant,
        priority=priority,
        cache_salt=cache_salt,
        group=group,
    )


@dataclass(slots=True)
class Reader:
    """What a gateway has of one request."""

    tokens: list[int] = field(default_factory=list)
    terminal: RequestEvent | None = None
    stops: list[int] = field(default_factory=list)
    """Where stop strings completed."""


@dataclass(slots=True)
class ShadowRow:
    """One row by its plans. `last_holding` is set when it left: the last plan made while it held its blocks."""

    request_id: str
    num_hits: int
    """Blocks at the front of its table that were computed before."""
    blocks: list[int] = field(default_factory=list)
    last_holding: int | None = None
    named: int = 0
    """Of a beam: the plan that made it what it is."""
    candidates_in: int = 0
    """The last result with candidates for it."""


@dataclass(slots=True)
class Shadow:
    """One worker incarnation, followed on the wire alone."""

    rows: dict[int, ShadowRow] = field(default_factory=dict)
    holders: dict[int, list[ShadowRow]] = field(default_factory=dict)
    """Rows that had a block since it was last given out to be written."""
    planned: int = 0
    answered: int = 0
    unapplied: deque[StepResult] = field(default_factory=deque)


@dataclass(slots=True)
class RecordedTick:
    """One tick, as log and plan streams would give it back."""

    tick: Tick
    log: list[LogMessage]
    intake: list[IntakeMessage]
    outcome: bytes


class World:
    """One pool. Methods named for what happens; `turn` is the leader's turn."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.core = SchedulerCore(config)
        self.records: dict[str, Submission] = {}
        self.workers: dict[str, ContentWorker] = {}
        self.dead: list[ContentWorker] = []
        self.incarnations: dict[str, int] = {}
        self.shadows: dict[str, Shadow] = {}
        self.readers: dict[str, Reader] = {}
        self.follower = StepLogFollower()
        self.log: list[LogMessage] = []
        self.pending_log: list[LogMessage] = []
        self.pending_intake: list[IntakeMessage] = []
        self.pending_events: list[WorkerEvent] = []
        self.ticks: list[RecordedTick] = []
        self.saved = save_core(self.core)
        self.saved_blocks: dict[Incarnation, dict[int, bytes]] = {}
        """What saves have left of each incarnation's cached blocks."""
        self.num_ticks = 0
        self.num_expected_ignored = 0
        self.num_preempted = 0
        self.num_handed_over = 0
        self.num_drained = 0
        self.num_hit_tokens = 0
        self.num_swapped = 0
        self.num_back = 0
        self.num_shared = 0
        """Hits on blocks that another row had at that time."""
        self._evictions: Counter[tuple[str, int]] = Counter()
        self.cached: dict[str, int] = {}
        """Cached prompt tokens of requests, as readers were told."""
        self.num_lost = 0
        self.num_logprobs = 0
        self.num_beam_copies = 0
        self.num_searches_preempted = 0
        self.num_searches = 0
        """Beam searches that came to their end."""
        self.events: list[RequestEvent] = []
        self.ended: list[Finished] = []
        self.admissions: list[str] = []
        self.arrived: dict[str, float] = {}
        """By request: the time of the tick that brought it."""
        self.num_bypasses = 0
        """As the core counts them, with any number of workers."""
        self.bypasses: Counter[str] = Counter()
        """By request: how often one of its class that came later was admitted before it."""
        self._digest = hashlib.sha256()

    # ------------------------------------------------------------ what happens

    def submit(self, submission: Submission) -> None:
        self.records[submission.request_id] = submission
        self.readers[submission.request_id] = Reader()
        self.follower.track(submission.request_id)
        self.pending_intake.append(Submit(submission.request_id))

    def abort(self, request_id: str) -> None:
        self.pending_intake.append(Abort(request_id, "client_disconnect"))

    def stop(self, request_id: str, num_output_tokens: int) -> None:
        reader = self.readers.get(request_id)
        if reader is not None and reader.terminal is None:
            reader.stops.append(num_output_tokens)
        self.pending_intake.append(Stop(request_id, num_output_tokens))

    def send(self, message: IntakeMessage) -> None:
        self.pending_intake.append(message)

    def join(self, name: str, num_blocks: int, num_cpu_blocks: int = 0, copy_rate: float = 0.0) -> None:
        """A worker starts (again): its old incarnation is fenced, whatever it did. `copy_rate` is in bytes/s."""
        self.fence(name)
        incarnation = self.incarnations.get(name, 0) + 1
        self.incarnations[name] = incarnation
        self.publish(WorkerFenced(name, incarnation - 1, "replaced"))
        self.workers[name] = ContentWorker(
            name,
            incarnation,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_tokens=self.config.max_num_batched_tokens,
            num_cpu_blocks=num_cpu_blocks,
            rates=(PREFILL_RATE, 0.0, float(copy_rate)),
        )
        self.shadows[name] = Shadow()
        self.pending_events.append(WorkerJoined(name, incarnation, num_blocks, num_cpu_blocks, BLOCK_BYTES))

    def fence(self, name: str) -> None:
        """The incarnation can publish nothing more. Nothing of it is in any world but the log."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.dead.append(worker)
            self.publish(WorkerFenced(name, worker.incarnation, "killed"))

    def drain(self, name: str) -> None:
        if name in self.workers:
            self.pending_events.append(WorkerDraining(name, self.workers[name].incarnation))

    def fail(self, request_id: str) -> None:
        """Whatever worker computes the request next cannot."""
        for worker in self.workers.values():
            worker.faulty.add(request_id)

    def step(self, name: str) -> bool:
        """The worker carries out one plan and publishes its result. False: it has none."""
        worker = self.workers.get(name)
        if worker is None or not worker.inbox:
            return False
        result = worker.step()
        self.shadows[name].unapplied.append(result)
        self.publish(result)
        return True

    def lose(self, name: str) -> bool:
        """The entry of the worker's next result cannot be read; the one after it shows that. False: it has not two."""
        worker = self.workers.get(name)
        if worker is None or len(worker.inbox) < 2:
            return False
        worker.step()
        self.num_lost += 1
        self.publish(worker.step())
        return True

    def publish(self, message: LogMessage) -> None:
        """Into the step log, for everyone."""
        self.log.append(message)
        self.pending_log.append(message)
        self._read(message)

    def publish_again(self, index: int) -> None:
        """An entry that was published before arrives a second time."""
        results = [entry for entry in self.log if isinstance(entry, StepResult)]
        if results:
            self.publish(results[index % len(results)])
            self.num_expected_ignored += 1

    def publish_from_the_grave(self, index: int) -> None:
        """A fenced incarnation's next result arrives late."""
        late = [worker for worker in self.dead if worker.inbox]
        if late:
            self.publish(late[index % len(late)].step())
            self.num_expected_ignored += 1

    # ------------------------------------------------------------ the leader

    def turn(self) -> None:
        """One turn: a tick with all inputs, then ticks without, until no plan is due; broken and drained workers are
        fenced."""
        while self.tick():
            pass
        for name, incarnation in self.core.drained_workers():
            if name in self.workers and self.workers[name].incarnation == incarnation:
                assert not (self.workers[name].rows or self.workers[name].inbox), "it is not done"
                self.num_drained += 1
                self.fence(name)
        for name, incarnation in self.core.broken_workers():
            assert self.num_lost, "a sound worker is called broken"
            if name in self.workers and self.workers[name].incarnation == incarnation:
                self.fence(name)

    def tick(self) -> bool:
        """One tick. False if it decided nothing."""
        self.num_ticks += 1
        log, self.pending_log = self.pending_log, []
        intake, self.pending_intake = self.pending_intake, []
        events, self.pending_events = self.pending_events, []
        number = self.num_ticks
        tick = Tick(number, f"{number}-0", f"{number}-0", number / 1000, tuple(events))
        for message in intake:
            if isinstance(message, Submit):
                self.arrived.setdefault(message.request_id, tick.now)
        running = self._running_by_worker()
        swapped = self._swapped()
        passed = {request.request_id: request.num_bypassed for request in self.core.waiting}
        before = take_snapshot(self.core) if not (log or intake or events) else b""
        outcome = apply_tick(self.core, tick, log, intake, self.records)
        self.ticks.append(RecordedTick(tick, log, intake, _outcome_bytes(outcome)))
        self._digest.update(_outcome_bytes(outcome))
        self._judge(outcome, log, running, swapped)
        waiting = {request.request_id: request.num_bypassed for request in self.core.waiting}
        self.num_bypasses += sum(count - passed[id] for id, count in waiting.items() if id in passed)
        for lane in self.core.lanes.values():
            self._evictions[lane.worker, lane.incarnation] = lane.pool.num_evictions
        if before and outcome.is_empty:
            assert take_snapshot(self.core) == before, "a turn that decided nothing changed the state"
        else:
            self.core.check_integrity()
            self.judge_cache()
        return not outcome.is_empty

    def save(self) -> None:
        """The leader writes its snapshot: the core, and the cached blocks that changed."""
        self.saved = save_core(self.core)
        for incarnation, parts in save_changed_blocks(self.core).items():
            self.saved_blocks.setdefault(incarnation, {}).update(parts)
        self.ticks.clear()

    def restart(self) -> None:
        """The leader dies: a new one restores the snapshot and applies the ticks since, which give the same plans."""
        saved = read_core(self.saved)
        needed = {request_id: self.records[request_id] for request_id in saved.request_ids}
        core = restore_core(saved, self.saved_blocks, self.config, needed)
        core.check_integrity()
        for recorded in self.ticks:
            outcome = apply_tick(core, recorded.tick, recorded.log, recorded.intake, self.records)
            assert _outcome_bytes(outcome) == recorded.outcome, f"tick {recorded.tick.number} is not what was committed"
        assert take_snapshot(core) == take_snapshot(self.core)
        self.core = core

    def settle(self, max_turns: int = 3000) -> None:
        """Let everything that was submitted come to its end, by fair weather."""
        for _ in range(max_turns):
            self.turn()
            num_steps = sum(self.step(name) for name in list(self.workers))
            if not (num_steps or self.pending_log or self.pending_intake or self.pending_events):
                return
        raise AssertionError("no end: livelock")

    def num_swapped_on(self, name: str) -> int:
        """Requests whose KV lies in the host pool of a worker."""
        return sum(swapped.lane.worker == name for swapped in self._swapped().values())

    @property
    def num_evicted(self) -> int:
        """Cached blocks that went because others needed the room."""
        return self._evictions.total()

    @property
    def digest(self) -> str:
        """Over everything that the core decided."""
        return self._digest.hexdigest()

    # ------------------------------------------------------------ readers

    def _read(self, message: LogMessage) -> None:
        for update in self.follower.apply(message):
            assert not update.gap or self.num_lost, f"reader of {update.request_id} lacks tokens"
            reader = self.readers[update.request_id]
            assert reader.terminal is None or not update.tokens, "tokens after the end"
            reader.tokens += update.tokens
            if update.event is not None and update.event.kind is EventKind.FINISHED:
                assert reader.terminal is None, "two ends"
                reader.terminal = update.event

    def _running_by_worker(self) -> dict[tuple[str, int], list[str]]:
        """Request ids that sit on each worker incarnation, by arrival."""
        running: dict[tuple[str, int], list[str]] = {}
        for request in sorted(self.core.requests.values(), key=lambda request: request.arrival):
            if request.seat is not None:
                lane = request.seat.lane
                running.setdefault((lane.worker, lane.incarnation), []).append(request.request_id)
        return running

    def _swapped(self) -> dict[str, SwappedOut]:
        return {id: request.swapped for id, request in self.core.requests.items() if request.swapped is not None}

    # ------------------------------------------------------------ judging the core by its words

    def _judge(
        self,
        outcome: TickOutcome,
        log: Sequence[LogMessage],
        running: dict[tuple[str, int], list[str]],
        swapped: dict[str, SwappedOut],
    ) -> None:
        for message in log:
            if isinstance(message, StepResult):
                self._shadow_result(message)
        entry = TickEntry(events=outcome.events, cached=outcome.cached)
        for request_id, num_cached_tokens in outcome.cached:
            assert request_id not in self.cached, "told twice"
            self.cached[request_id] = num_cached_tokens
        if outcome.events or outcome.cached:
            self.log.append(entry)
            self._read(entry)
        ended = {event.request_id for event in outcome.events if event.kind is EventKind.FINISHED}
        still_running = {key: [id for id in ids if id not in ended] for key, ids in running.items()}
        for event in outcome.events:
            self._judge_event(event, {key: ids for key, ids in still_running.items() if ids})
        self._judge_finals(outcome)
        self.events += outcome.events
        self.ended += outcome.finished
        if outcome.plan is not None:
            lane = self.core.lanes[outcome.plan.worker]
            here = {id for id, left in swapped.items() if left.lane is lane}
            back = [new.request_id for new in outcome.plan.plan.added if new.request_id in here]
            self._judge_swaps(outcome.plan.plan, outcome.plan.worker, swapped, back)
            self._judge_admissions(outcome.plan.plan, outcome.plan.worker, back)
            self._shadow_plan(outcome.plan.worker, outcome.plan.incarnation, outcome.plan.plan, back)

    def _judge_event(self, event: RequestEvent, running: dict[tuple[str, int], list[str]]) -> None:
        if event.kind is EventKind.PREEMPTED:
            told = self.readers[event.request_id].tokens
            # A reader may take a token that the core does not believe any more; it is the one that comes again.
            assert event.num_output_tokens == len(told) or (self.num_lost and event.num_output_tokens < len(told))
            if event.reason == "drain":
                (worker,) = [worker for (worker, _), ids in running.items() if event.request_id in ids]
                assert self.core.lanes[worker].draining and len(self.core.lanes) > 1
                self.num_handed_over += 1
                return
            self.num_preempted += 1
            self.num_searches_preempted += self.records[event.request_id].params.beam_width > 0
            assert any(event.request_id in others for _, *others in running.values()), "the oldest was preempted"
            return
        reader = self.readers[event.request_id]
        if self.records[event.request_id].params.beam_width:
            assert not reader.tokens, "a token of a beam search in the log"
            return  # its final record is judged
        reference, ending = reference_output(self.records[event.request_id])
        told = reader.tokens[: event.num_output_tokens]
        assert len(told) == event.num_output_tokens and told == reference[: len(told)], "not the text it would have had"
        if event.reason in (FinishReason.LENGTH, FinishReason.STOP) and event.num_output_tokens not in reader.stops:
            assert told == reference, "ended early"
            assert (event.reason == FinishReason.LENGTH) == (ending.name == "LENGTH")

    def _judge_finals(self, outcome: TickOutcome) -> None:
        finished = [event for event in outcome.events if event.kind is EventKind.FINISHED]
        assert [event.request_id for event in finished] == [final.request_id for final in outcome.finished]
        for event, end in zip(finished, outcome.finished, strict=True):
            assert (end.final.reason, end.final.num_output_tokens) == (event.reason, event.num_output_tokens)
            if self.records[end.request_id].params.beam_width:
                self._judge_search(end)
                continue
            assert list(unpack_int32(end.output)) == self.readers[end.request_id].tokens[: event.num_output_tokens]
            self._judge_logprobs(end)

    def _judge_search(self, end: Finished) -> None:
        found = [
            (list(unpack_int32(text.tokens)), text.score, EndReason(text.end_reason)) for text in end.final.hypotheses
        ]
        if end.final.reason not in (FinishReason.LENGTH, FinishReason.STOP):
            assert not found and not end.output
            return
        submission = self.records[end.request_id]
        assert found == reference_beams(submission), "not the texts that the search would have found alone"
        best, _, reason = found[0]
        assert list(unpack_int32(end.output)) == best and end.final.end_reason == reason
        assert end.final.reason is FINISH_REASONS[reason] and end.final.num_output_tokens == len(best)
        assert end.final.cumulative_logprob == reference_logprob(submission, best)
        self.num_searches += 1

    def _judge_logprobs(self, end: Finished) -> None:
        submission, output = self.records[end.request_id], unpack_int32(end.output)
        if submission.params.with_logprobs:
            assert end.final.cumulative_logprob == reference_logprob(submission, output), "not the tokens' probability"
            assert sum(unpack_float32(end.logprobs)) == end.final.cumulative_logprob
            self.num_logprobs += len(output)
        else:
            assert not end.final.cumulative_logprob and not end.logprobs

    def _judge_swaps(self, plan: StepPlan, worker: str, before: dict[str, SwappedOut], back: list[str]) -> None:
        """Pinned host blocks are nobody else's; who comes back is given all that it left; nobody goes before them."""
        pairs = {kind: _pairs_of(plan, kind) for kind in CopyKind}
        after = {id: swapped for id, swapped in self._swapped().items() if swapped.lane.worker == worker}
        left = [id for id in after if id not in before]
        put = [slot for _, slot in pairs[CopyKind.OUT]]
        read = [slot for slot, _ in pairs[CopyKind.IN]]
        for request_id, swapped in after.items():
            assert not set(swapped.slots) & set(read), "what is swapped out stays there"
            assert set(swapped.slots) <= set(put) if request_id in left else not set(swapped.slots) & set(put)
        tables = self._tables(plan)
        for new in plan.added:
            if new.request_id in back:
                slots, blocks = before[new.request_id].slots, tables[new.row]
                came = {block: slot for slot, block in pairs[CopyKind.IN]}
                expected = [(slot, block) for slot, block in zip(slots, blocks, strict=False) if block in came]
                assert expected == [(came[block], block) for _, block in expected], "blocks in another order"
                assert len(slots) - len(expected) <= new.num_computed_tokens // self.config.block_size
        assert not (left and plan.added), "a plan swaps out and seats"
        assert [new.request_id for new in plan.added[: len(back)]] == back, "those that come back go first"
        assert not after or len(plan.added) == len(back), "somebody was admitted before a swapped one"
        self.num_swapped += len(left)
        self.num_back += len(back)

    def _tables(self, plan: StepPlan) -> dict[int, list[int]]:
        tables: dict[int, list[int]] = {}
        numbers = unpack_int32(plan.blocks)
        for row, block_id in zip(numbers[::2], numbers[1::2], strict=True):
            tables.setdefault(row, []).append(block_id)
        return tables

    def _judge_admissions(self, plan: StepPlan, worker: str, back: list[str]) -> None:
        """With one worker, requests of a class go in their order, and classes in that of the policy.

        A fresh one that would fit an empty worker may be passed a few times; one that ran before never is.
        """
        if len(self.core.lanes) > 1 or len(plan.added) == len(back):
            return
        room = self.core.lanes[worker].pool.num_blocks
        added = [self.core.requests[new.request_id] for new in plan.added[len(back) :]]
        order = self._order([*self.core.waiting, *added])
        seats = [request.seat for request in self.core.requests.values() if request.seat is not None]
        computing = {seat.request.submission.group for seat in seats if seat.first in (0, plan.plan_id)} - {""}
        for request in added:
            for passed in order[: order.index(request)]:
                is_able = (
                    passed.most_blocks(self.config.block_size) <= room and passed.submission.group not in computing
                )
                if self.core.lanes[worker].draining:  # it takes back only what ran before
                    is_able = is_able and passed.request_id in self.admissions
                if passed in added or not is_able or not self._are_compared(passed, request):
                    continue
                assert passed.request_id not in self.admissions, "one that ran before was passed over"
                self.bypasses[passed.request_id] += 1
                assert self.bypasses[passed.request_id] <= self.config.max_bypasses, "passed over too often"
        for one, other in itertools.pairwise(added):
            assert not self._are_compared(one, other) or order.index(one) < order.index(other), "out of order"

    def _order(self, waiting: list[Request]) -> list[Request]:
        """As they should go: the class whose oldest has the smallest rank, in it those that ran, then by arrival."""
        order = []
        while waiting:
            oldest = min(waiting, key=self._rank)
            peers = [peer for peer in waiting if self._class(peer) == self._class(oldest)]
            order.append(min(peers, key=lambda peer: (peer.request_id not in self.admissions, peer.arrival)))
            waiting.remove(order[-1])
        return order

    def _class(self, request: Request) -> int:
        return request.submission.priority if self.config.policy is PolicyName.PRIORITY else 0

    def _rank(self, request: Request) -> tuple[float, int]:
        if self.config.policy is not PolicyName.PRIORITY:
            return 0.0, request.arrival
        ageing_s = self.config.priority_ageing_s
        return self.arrived[request.request_id] + request.submission.priority * ageing_s, request.arrival

    def _are_compared(self, one: Request, other: Request) -> bool:
        """Tenants that share fairly have no order among each other that the world could tell."""
        return self.config.policy is not PolicyName.FAIR or one.submission.tenant == other.submission.tenant

    def _shadow_result(self, result: StepResult) -> None:
        shadow = self.shadows.get(result.worker)
        if shadow is None or not shadow.unapplied or shadow.unapplied[0] is not result:
            return
        shadow.unapplied.popleft()
        shadow.answered = result.step_id
        for candidates in result.candidates:
            if candidates.row in shadow.rows:
                shadow.rows[candidates.row].candidates_in = result.step_id
        for row, _ in result.ended:
            ended = shadow.rows.pop(row, None)
            if ended is not None:
                ended.last_holding = shadow.planned
                for other in shadow.rows.values():  # its beams go with it
                    if other.request_id == ended.request_id:
                        other.last_holding = shadow.planned

    def _shadow_plan(self, name: str, incarnation: int, plan: StepPlan, back: list[str]) -> None:
        shadow = self.shadows[name]
        if incarnation == self.incarnations[name] and name in self.workers:
            self.workers[name].inbox.append(plan)
            assert plan.plan_id == shadow.planned + 1
        for row in plan.dropped:
            dropped = shadow.rows.pop(row, None)
            if dropped is not None:
                dropped.last_holding = shadow.planned
        self._shadow_copies(shadow, plan)
        for new in plan.added:
            assert new.row not in plan.dropped, "a row is reused in the plan that drops it"
            assert new.row not in shadow.rows, "a row is in use"
            shadow.rows[new.row] = ShadowRow(new.request_id, new.num_computed_tokens // self.config.block_size)
            self.admissions.append(new.request_id)
            self._judge_hits(new, back)
        self._shadow_beams(shadow, plan)
        assert len(shadow.rows) <= self.config.max_num_seqs
        self._shadow_blocks(shadow, plan)
        shadow.planned = plan.plan_id

    def _shadow_copies(self, shadow: Shadow, plan: StepPlan) -> None:
        """Only what was written is copied away. (What comes from the host was, if the worker has it; it looks.)"""
        for block_id, _ in _pairs_of(plan, CopyKind.OUT):
            assert block_id in shadow.holders, f"block {block_id} was never written"

    def _shadow_blocks(self, shadow: Shadow, plan: StepPlan) -> None:
        pairs: array[int] = unpack_int32(plan.blocks)
        filled = {block_id for _, block_id in _pairs_of(plan, CopyKind.IN)}
        for row, block_id in zip(pairs[::2], pairs[1::2], strict=True):
            taker = shadow.rows[row]
            if len(taker.blocks) < taker.num_hits and block_id not in filled:
                assert block_id in shadow.holders, f"block {block_id} was never written"
                self._share_block(shadow, taker, block_id)
            else:
                filled.discard(block_id)  # whoever else begins with it in this plan hits it
                self._take_block(shadow, taker, block_id)
            limit = self.records[taker.request_id]
            most = len(limit.prompt_tokens) // 4 + limit.params.max_tokens - 1
            assert len(taker.blocks) <= self.config.blocks_for(most), "blocks for tokens that can never be computed"

    def _take_block(self, shadow: Shadow, taker: ShadowRow, block_id: int) -> None:
        """The block is to be written, so nobody may hold it."""
        for holder in shadow.holders.pop(block_id, ()):
            assert holder.last_holding is not None, f"block {block_id} is in two tables"
            assert holder.last_holding <= shadow.answered, f"block {block_id} is named by an unanswered plan"
        self._share_block(shadow, taker, block_id)

    def _share_block(self, shadow: Shadow, taker: ShadowRow, block_id: int) -> None:
        sharers = shadow.holders.setdefault(block_id, [])
        self.num_shared += any(holder.last_holding is None for holder in sharers)
        sharers.append(taker)
        taker.blocks.append(block_id)

    def _shadow_beams(self, shadow: Shadow, plan: StepPlan) -> None:
        """Beams take over from all present rows of their search, whose result is known."""
        parents = {beam.parent: shadow.rows[beam.parent] for beam in plan.beams}
        searching = {parent.request_id for parent in parents.values()}
        for number, row in list(shadow.rows.items()):
            if row.request_id in searching:
                assert row.candidates_in >= max(1, row.named), "a search is planned ahead of its result"
                row.last_holding = row.candidates_in
                del shadow.rows[number]
        copies = {into: source for source, into in _pairs_of(plan, CopyKind.WITHIN)}
        for beam in plan.beams:
            assert beam.row not in shadow.rows and beam.row not in plan.dropped, "a row is in use"
            self._shadow_heir(shadow, beam, parents[beam.parent], copies).named = plan.plan_id

    def _shadow_heir(self, shadow: Shadow, beam: BeamRow, parent: ShadowRow, copies: dict[int, int]) -> ShadowRow:
        heir = shadow.rows[beam.row] = ShadowRow(parent.request_id, num_hits=0)
        for block_id in parent.blocks if beam.block == -1 else parent.blocks[:-1]:
            self._share_block(shadow, heir, block_id)
        if beam.block != -1:
            assert copies[beam.block] == parent.blocks[-1], "a copy of another block"
            self._take_block(shadow, heir, beam.block)
            self.num_beam_copies += 1
        return heir

    def _judge_hits(self, new: NewRow, back: list[str]) -> None:
        """Only whole blocks are hit, and never a request's last token. A fork has all of its prompt but that."""
        assert new.num_computed_tokens < len(new.tokens) // 4
        is_fork = self.records[new.request_id].group and new.num_computed_tokens == new.num_prompt_tokens - 1
        if is_fork or new.request_id in back:
            return
        assert new.num_computed_tokens % self.config.block_size == 0
        assert self.config.enable_prefix_caching or not new.num_computed_tokens
        self.num_hit_tokens += new.num_computed_tokens

    def judge_cache(self) -> None:
        """What the cache says of a block is what the worker wrote there."""
        for worker in self.workers.values():
            lane = self.core.lanes.get(worker.name)
            if lane is not None and lane.incarnation == worker.incarnation:
                for entry in lane.pool.cache:
                    held = worker.will_hold(entry.block_id)
                    assert held == entry.tokens, f"block {entry.block_id} holds something else"
                self._judge_host(worker, lane)

    def _judge_host(self, worker: ContentWorker, lane: Lane) -> None:
        """What was swapped out is there."""
        for request in lane.swapped.values():
            swapped = request.swapped
            assert swapped is not None
            held = b"".join(worker.will_hold(~slot) for slot in swapped.slots)
            assert held[: 4 * swapped.num_computed] == request.known_tokens()[: 4 * swapped.num_computed]

    def judge_idle(self) -> None:
        """Everything has ended, with its whole text, and every block is free or cached."""
        stats = self.core.stats()
        assert self.core.is_idle
        assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
        assert stats.num_free_cpu_blocks + stats.num_cached_cpu_blocks == stats.num_cpu_blocks
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        self.judge_cache()
        assert stats.left_requests == sum(count for _, count in stats.finished)
        for request_id, reader in self.readers.items():
            assert reader.terminal is not None, f"{request_id} never ended"


def _pairs_of(plan: StepPlan, kind: CopyKind) -> list[tuple[int, int]]:
    numbers = [number for copy in plan.copies if copy.kind is kind for number in unpack_int32(copy.pairs)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _outcome_bytes(outcome: TickOutcome) -> bytes:
    parts = [encode(event) for event in outcome.events] + [repr(outcome.cached).encode()]
    if outcome.plan is not None:
        parts.append(f"{outcome.plan.worker}:{outcome.plan.incarnation}".encode())
        parts.append(encode(outcome.plan.plan))
    for end in outcome.finished:
        parts += [end.request_id.encode(), encode(end.final), end.output]
    return b"".join(parts)
