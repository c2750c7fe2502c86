"""Restart without loss: the snapshot, and every tick committed after it, applied again through the same code.

    snapshot (tick n) ── tick n+1 ── … ── tick of the fence ── go on, plans in flight included

Ticks lie in the plan streams (of every incarnation since) and in the step log. Each must lead to exactly the bytes that
were committed; the slightest difference means that this code or state is not that of the leader before, and only a cold
start is safe.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import redis

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.snapshot import read_core
from services.scheduler.core.ticks import TickOutcome, apply_tick
from services.scheduler.recording.recorder import Recorder
from services.scheduler.service import logs
from services.scheduler.service.inbox import decode_intake, decode_log
from services.scheduler.service.position import Position, Snapshot
from services.scheduler.service.saving import read_blocks
from services.scheduler.service.submissions import load_submissions
from services.scheduler.service.trimmer import Incarnation
from shared.errors import PagewireError, ProtocolError
from shared.keys import Keys
from shared.messages import Decoder, StepPlan, Tick, TickEntry, encode
from shared.records import read_submissions
from shared.scripts import FenceState
from shared.streams import Entry, entry_order, scan

_plans: Decoder[StepPlan] = Decoder(StepPlan)
M = TypeVar("M")


class ReplayFailed(PagewireError):
    """The committed ticks cannot be derived again: start cold."""


@dataclass(frozen=True, slots=True)
class CommittedTick:
    """A tick as it was committed: in the plan of `incarnation`, or in an entry of its own (None)."""

    tick: Tick
    incarnation: Incarnation | None
    payload: bytes


def replay(
    client: redis.Redis,
    keys: Keys,
    snapshot: Snapshot,
    config: SchedulerConfig,
    fence: FenceState,
    recorder: Recorder | None = None,
) -> Position:
    """The position at the last committed tick. What an earlier leader committed is recorded here once more, because it
    may have died before it had written it.

    Raises:
        ReplayFailed: a tick is missing or leads to something else.
        UnusableSnapshot: other format or configuration, or a submission or a block is missing.
        ProtocolError: a plan is unreadable.
        RedisFailure: Redis did not answer.
    """
    saved = read_core(snapshot.core)
    submissions = read_submissions(client, keys, saved.request_ids)
    position = snapshot.restore(saved, read_blocks(client, keys, snapshot), config, submissions)
    if recorder is not None:
        recorder.begin(position.core, epoch=fence.epoch, tick=position.tick, now=position.now, cause="takeover")
    log = list(scan(client, keys.steps, after=snapshot.log_id))
    ticks = _committed_ticks(client, keys, position, log, fence)
    log_messages = deque(_readable(log, decode_log))
    intake = deque(_readable(scan(client, keys.intake, after=snapshot.intake_id), decode_intake))
    submissions = load_submissions(client, keys, (message for _, message in intake))
    for committed in ticks:
        tick = committed.tick
        news, arrived = _take(log_messages, tick.log_id), _take(intake, tick.intake_id)
        try:
            outcome = apply_tick(position.core, tick, news, arrived, submissions)
        except Exception as error:  # whatever a core does that is not in the state it claims
            raise ReplayFailed(f"tick {tick.number} cannot be applied: {error!r}") from error
        _compare(committed, outcome)
        if recorder is not None:
            recorder.on_tick(position.core, tick, news, arrived, submissions, outcome)
        position.tick, position.now = tick.number, tick.now
        position.intake_id, position.log_id = tick.intake_id, tick.log_id
    if recorder is not None:
        recorder.on_commit()
    logs.info("ticks_replayed", snapshot_tick=snapshot.tick, num_ticks=len(ticks), tick=position.tick)
    return position


def plan_streams(fence: FenceState, first: Mapping[str, int]) -> list[Incarnation]:
    """Incarnations that may have a plan stream: of every worker, from `first` (else from 1) to the present one."""
    return [
        Incarnation(worker, number)
        for worker, state in fence.workers.items()
        for number in range(max(1, first.get(worker, 1)), state.incarnation + 1)
    ]


def _committed_ticks(
    client: redis.Redis, keys: Keys, position: Position, log: list[Entry], fence: FenceState
) -> list[CommittedTick]:
    """All ticks after the snapshot's, in order and without a gap."""
    found = [
        CommittedTick(tick, None, payload)
        for payload in (entry.payload for entry in log)
        if (tick := _tick_of_entry(payload)) is not None
    ]
    # Whatever was fenced before the snapshot has no later ticks.
    first = {worker: known.fenced + 1 for worker, known in position.core.known_workers.items()}
    for incarnation in plan_streams(fence, first):
        for _, payload in scan(client, keys.plans(incarnation.worker, incarnation.number)):
            found.append(CommittedTick(_plans.decode(payload).tick, incarnation, payload))
    later = sorted((c for c in found if c.tick.number > position.tick), key=lambda c: c.tick.number)
    if [committed.tick.number for committed in later] != list(range(position.tick + 1, fence.tick + 1)):
        raise ReplayFailed(f"the {len(later)} ticks found are not {position.tick + 1} to {fence.tick}")
    return later


def _tick_of_entry(payload: bytes) -> Tick | None:
    try:
        message = decode_log(payload)
    except ProtocolError:
        return None
    return message.tick if isinstance(message, TickEntry) else None


def _readable(entries: Iterable[Entry], decode: Callable[[bytes], M]) -> Iterator[tuple[str, M]]:
    """(entry id, message), without the entries that the leader passed over as well."""
    for entry_id, payload in entries:
        try:
            yield entry_id, decode(payload)
        except ProtocolError:
            continue


def _take(messages: deque[tuple[str, M]], until: str) -> list[M]:
    """Remove and answer the messages up to the entry `until`."""
    last, taken = entry_order(until), []
    while messages and entry_order(messages[0][0]) <= last:
        taken.append(messages.popleft()[1])
    return taken


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
