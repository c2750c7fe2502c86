"""The scheduler core in a small world of content workers, readers and a step log, in which everything may go wrong.

The world judges the core by what crosses the wire (plans, results, events), with its own book-keeping: of blocks
(block_shadow.py), of order (admission_judge.py) and of texts (text_judge.py). The core's internals are checked by
`check_integrity`. Everything is deterministic: the same calls give the same `digest`.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cpu_tier import SwappedOut
from services.scheduler.core.lane import Lane
from services.scheduler.core.outcomes import Finished
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
    Abort,
    EventKind,
    IntakeMessage,
    LogMessage,
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
from shared.packing import pack_int32
from shared.sampling import SamplingParams
from shared.step_log import StepLogFollower
from tests.fakes.admission_judge import AdmissionJudge
from tests.fakes.block_shadow import Shadow, judge_swaps
from tests.fakes.budget_judge import judge_cost, judge_prefill
from tests.fakes.content_worker import ContentWorker
from tests.fakes.drawn_rates import BLOCK_BYTES
from tests.fakes.text_judge import Reader, TextJudge


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
        self.num_swapped = 0
        self.num_back = 0
        self._evictions: Counter[tuple[str, int]] = Counter()
        self.cached: dict[str, int] = {}
        """Cached prompt tokens of requests, as readers were told."""
        self.num_lost = 0
        self.num_searches_preempted = 0
        self.events: list[RequestEvent] = []
        self.ended: list[Finished] = []
        self.num_bypasses = 0
        """As the core counts them, with any number of workers."""
        self.counts: Counter[str] = Counter()
        """What the judges saw happen, by their words for it."""
        self._order = AdmissionJudge(config, self.counts)
        self._texts = TextJudge(self.records, self.readers, self.counts)
        self.admissions, self.bypasses = self._order.admissions, self._order.bypasses
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

    def join(
        self,
        name: str,
        num_blocks: int,
        num_cpu_blocks: int = 0,
        rates: Sequence[tuple[float, ...]] = (),
        fingerprint: str = "",
    ) -> None:
        """A worker starts (again): its old incarnation is fenced, whatever it did. `rates`: see `ContentWorker`."""
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
            rates=rates,
        )
        self.shadows[name] = Shadow(self.config, self.records, self.counts)
        joined = WorkerJoined(name, incarnation, num_blocks, num_cpu_blocks, BLOCK_BYTES, fingerprint)
        self.pending_events.append(joined)

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
                self._order.arrived.setdefault(message.request_id, tick.now)
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
    def num_hit_tokens(self) -> int:
        return self.counts["hit tokens"]

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
            if isinstance(message, StepResult) and message.worker in self.shadows:
                self.shadows[message.worker].result(message)
        self._tell(outcome)
        ended = {event.request_id for event in outcome.events if event.kind is EventKind.FINISHED}
        still_running = {key: [id for id in ids if id not in ended] for key, ids in running.items()}
        for event in outcome.events:
            if event.kind is EventKind.PREEMPTED:
                self._judge_preemption(event, {key: ids for key, ids in still_running.items() if ids})
            else:
                self._texts.event(event)
        self._judge_finals(outcome)
        self.events += outcome.events
        self.ended += outcome.finished
        if outcome.plan is not None:
            self._judge_plan(outcome.plan.worker, outcome.plan.incarnation, outcome.plan.plan, swapped)

    def _tell(self, outcome: TickOutcome) -> None:
        """What the tick says to readers of the log."""
        for request_id, num_cached_tokens in outcome.cached:
            assert request_id not in self.cached, "told twice"
            self.cached[request_id] = num_cached_tokens
        if outcome.events or outcome.cached:
            entry = TickEntry(events=outcome.events, cached=outcome.cached)
            self.log.append(entry)
            self._read(entry)

    def _judge_preemption(self, event: RequestEvent, running: dict[tuple[str, int], list[str]]) -> None:
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

    def _judge_finals(self, outcome: TickOutcome) -> None:
        finished = [event for event in outcome.events if event.kind is EventKind.FINISHED]
        assert [event.request_id for event in finished] == [final.request_id for final in outcome.finished]
        for event, end in zip(finished, outcome.finished, strict=True):
            assert (end.final.reason, end.final.num_output_tokens) == (event.reason, event.num_output_tokens)
            self._texts.final(end)

    def _judge_plan(self, name: str, incarnation: int, plan: StepPlan, swapped: dict[str, SwappedOut]) -> None:
        lane = self.core.lanes[name]
        here = {id for id, left in swapped.items() if left.lane is lane}
        # Behind somebody else who enters it is one that gave its copies up for him, and begins again.
        back = list(takewhile(here.__contains__, (new.request_id for new in plan.added)))
        after = {id: left for id, left in self._swapped().items() if left.lane.worker == name}
        self.num_swapped += judge_swaps(plan, swapped, after, back, self.config.block_size)
        judge_cost(self.config, lane, [left for id, left in after.items() if id not in swapped])
        self.num_back += len(back)
        self._order.judge(self.core, plan, name, len(back))
        self.counts.update(judge_prefill(self.config, lane, plan))
        if incarnation == self.incarnations[name] and name in self.workers:
            self.workers[name].inbox.append(plan)
            assert plan.plan_id == self.shadows[name].planned + 1
        self.shadows[name].plan(plan, back)

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


def _outcome_bytes(outcome: TickOutcome) -> bytes:
    parts = [encode(event) for event in outcome.events] + [repr(outcome.cached).encode()]
    if outcome.plan is not None:
        parts.append(f"{outcome.plan.worker}:{outcome.plan.incarnation}".encode())
        parts.append(encode(outcome.plan.plan))
    for end in outcome.finished:
        parts += [end.request_id.encode(), encode(end.final), end.output]
    return b"".join(parts)
