"""Following: every tick that a leader commits, applied again through the same code.

    snapshot (tick n) ── tick n+1 ── tick n+2 ── … ── tick of the fence ── lead, plans in flight included

A standby follows without end and is at the last tick when the leader dies. A scheduler that finds nobody leading opens
the snapshot and follows to the end at once: that is a restart.

Ticks lie in the plan streams and in the step log. Each must lead to exactly the bytes that were committed; the
slightest difference means that this code or state is not that of the leader, and only a later snapshot, or a cold
start, is safe.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import redis

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.snapshot import read_core
from services.scheduler.core.ticks import TickOutcome, apply_tick
from services.scheduler.recording.recorder import Recorder
from services.scheduler.service.inbox import PAGE, decode_intake, decode_log
from services.scheduler.service.position import Position, Snapshot
from services.scheduler.service.saving import read_blocks
from services.scheduler.service.submissions import load_submissions
from services.scheduler.service.trimmer import Incarnation
from shared.errors import PagewireError, ProtocolError
from shared.keys import Keys
from shared.messages import (
    Decoder,
    IntakeMessage,
    LogMessage,
    StepPlan,
    Submission,
    Tick,
    TickEntry,
    WorkerFenced,
    encode,
)
from shared.records import read_submissions
from shared.streams import START, Entry, entry_order, read

_plans: Decoder[StepPlan] = Decoder(StepPlan)
M = TypeVar("M")


class ReplayFailed(PagewireError):
    """The committed ticks cannot be derived again from this position."""


@dataclass(frozen=True, slots=True)
class CommittedTick:
    """A tick as it was committed: in the plan of `incarnation`, or in an entry of its own (None)."""

    tick: Tick
    incarnation: Incarnation | None
    payload: bytes


class Follower:
    """A position that is brought up to the last committed tick by every `follow`."""

    def __init__(self, client: redis.Redis, keys: Keys, position: Position, recorder: Recorder | None = None) -> None:
        self._client = client
        self._keys = keys
        self.position = position
        self._recorder = recorder
        self._read = {keys.steps: position.log_id, keys.intake: position.intake_id}
        """How far each stream was read."""
        self._plans: dict[str, Incarnation] = {}
        """The plan streams among them."""
        self._found: dict[int, CommittedTick] = {}
        """By number: read and not applied."""
        self._log: deque[tuple[str, LogMessage]] = deque()
        self._intake: deque[tuple[str, IntakeMessage]] = deque()
        self._submissions: dict[str, Submission] = {}
        """Of `_intake`. A recorder may hold it: it is replaced, never changed."""
        for worker, known in position.core.known_workers.items():
            self._watch(Incarnation(worker, known.fenced + 1))

    def follow(self) -> int:
        """Apply every tick that is committed by now; how many those were.

        Raises:
            ReplayFailed: a tick is missing, or leads to something else. This follower is of no use any more.
            ProtocolError: a plan is unreadable; likewise.
            RedisFailure: Redis did not answer; call again.
        """
        before, is_whole = self.position.tick, False
        while not is_whole:
            is_whole = self._read_on()
            self._apply_found()
        if self._found:  # all streams were read at one moment, so it is not on its way
            raise ReplayFailed(f"tick {self.position.tick + 1} is missing")
        self._forget_fenced()
        return self.position.tick - before

    # ------------------------------------------------------------ reading

    def _read_on(self) -> bool:
        """Read a page of every stream; whether that was all."""
        news = read(self._client, self._read, count=PAGE)
        num_streams = len(self._read)
        for stream, entries in news.items():
            if stream == self._keys.steps:
                self._take_log(entries)
            elif stream == self._keys.intake:
                self._take_intake(entries)
            else:
                self._take_plans(self._plans[stream], entries)
            self._read[stream] = entries[-1].entry_id
        return len(self._read) == num_streams and all(len(entries) < PAGE for entries in news.values())

    def _take_log(self, entries: Sequence[Entry]) -> None:
        for entry_id, payload, message in _readable(entries, decode_log):
            self._log.append((entry_id, message))
            if isinstance(message, TickEntry) and message.tick is not None:
                self._note(CommittedTick(message.tick, None, payload))
            elif isinstance(message, WorkerFenced):
                self._watch(Incarnation(message.worker, message.incarnation + 1))

    def _take_intake(self, entries: Sequence[Entry]) -> None:
        arrived = [(entry_id, message) for entry_id, _, message in _readable(entries, decode_intake)]
        found = load_submissions(self._client, self._keys, (message for _, message in arrived))
        self._intake.extend(arrived)
        self._submissions = {**self._submissions, **found}

    def _take_plans(self, incarnation: Incarnation, entries: Sequence[Entry]) -> None:
        for _, payload in entries:
            self._note(CommittedTick(_plans.decode(payload).tick, incarnation, payload))

    def _note(self, committed: CommittedTick) -> None:
        number = committed.tick.number
        if number in self._found:
            raise ReplayFailed(f"tick {number} was committed twice")
        if number > self.position.tick:
            self._found[number] = committed

    def _watch(self, incarnation: Incarnation) -> None:
        stream = self._keys.plans(incarnation.worker, incarnation.number)
        self._plans[stream] = incarnation
        self._read.setdefault(stream, START)

    def _forget_fenced(self) -> None:
        """What a tick took note of as fenced gets no plan any more. Nor does who is not remembered, unless a fence was
        read that is to be applied."""
        known = self.position.core.known_workers
        coming = {message.worker for _, message in self._log if isinstance(message, WorkerFenced)}
        for stream, (worker, number) in list(self._plans.items()):
            if number <= known[worker].fenced if worker in known else worker not in coming:
                del self._plans[stream], self._read[stream]

    # ------------------------------------------------------------ applying

    def _apply_found(self) -> None:
        while (committed := self._found.get(self.position.tick + 1)) is not None and self._has_inputs_of(committed):
            del self._found[committed.tick.number]
            self._apply(committed)
        if not self._intake:
            self._submissions = {}

    def _has_inputs_of(self, committed: CommittedTick) -> bool:
        tick, read_to = committed.tick, self._read
        return not (
            _is_before(read_to[self._keys.steps], tick.log_id) or _is_before(read_to[self._keys.intake], tick.intake_id)
        )

    def _apply(self, committed: CommittedTick) -> None:
        position, tick = self.position, committed.tick
        log, intake = _take(self._log, tick.log_id), _take(self._intake, tick.intake_id)
        try:
            outcome = apply_tick(position.core, tick, log, intake, self._submissions)
        except Exception as error:  # whatever a core does that is not in the state it claims
            raise ReplayFailed(f"tick {tick.number} cannot be applied: {error!r}") from error
        _compare(committed, outcome)
        if self._recorder is not None:
            self._recorder.on_tick(position.core, tick, log, intake, self._submissions, outcome)
        position.tick, position.now = tick.number, tick.now
        position.intake_id, position.log_id = tick.intake_id, tick.log_id


def open_follower(
    client: redis.Redis,
    keys: Keys,
    snapshot: Snapshot,
    config: SchedulerConfig,
    *,
    epoch: int = 0,
    recorder: Recorder | None = None,
) -> Follower:
    """A follower that stands at `snapshot`. The leader of `epoch` records here once more what it follows, because its
    predecessor may have died before it had written it.

    Raises:
        UnusableSnapshot: other format or configuration, or a submission or a block is missing.
        RedisFailure: Redis did not answer.
    """
    saved = read_core(snapshot.core)
    submissions = read_submissions(client, keys, saved.request_ids)
    position = snapshot.restore(saved, read_blocks(client, keys, snapshot), config, submissions)
    if recorder is not None:
        recorder.begin(position.core, epoch=epoch, tick=position.tick, now=position.now, cause="takeover")
    return Follower(client, keys, position, recorder)


def _readable(entries: Sequence[Entry], decode: Callable[[bytes], M]) -> Iterator[tuple[str, bytes, M]]:
    """(entry id, payload, message), without the entries that the leader passed over as well."""
    for entry_id, payload in entries:
        try:
            yield entry_id, payload, decode(payload)
        except ProtocolError:
            continue


def _take(messages: deque[tuple[str, M]], until: str) -> list[M]:
    """Remove and answer the messages up to the entry `until`."""
    taken = []
    while messages and not _is_before(until, messages[0][0]):
        taken.append(messages.popleft()[1])
    return taken


def _is_before(one: str, other: str) -> bool:
    return entry_order(one) < entry_order(other)


def _compare(committed: CommittedTick, outcome: TickOutcome) -> None:
    planned = outcome.plan
    if planned is None:
        incarnation = None
        payload = encode(TickEntry(tick=committed.tick, events=outcome.events, cached=outcome.cached))
    else:
        incarnation = Incarnation(planned.worker, planned.incarnation)
        payload = encode(planned.plan)
    if incarnation != committed.incarnation or payload != committed.payload:
        raise ReplayFailed(f"tick {committed.tick.number} leads to something else")
