"""Start without a usable snapshot: end every incarnation, then rebuild the live requests from records and log.

1. Fence all workers. What they published until then counts, nothing after it can exist.
2. Live requests are the records without an end: committed output = record + log after the record's `log_id`.
3. Requeue them with that output; those that a worker had ended get their end now.
4. One tick carries it all, with a snapshot: it is never replayed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.service import logs
from services.scheduler.service.inbox import decode_intake, decode_log
from services.scheduler.service.position import Position
from services.scheduler.service.submissions import is_sound
from shared.errors import Fenced, ProtocolError
from shared.keys import Keys
from shared.messages import Abort, EndReason, EventKind, IntakeMessage, Stop
from shared.records import RequestRecord, parse_record
from shared.scripts import FenceState, fence_worker
from shared.step_log import StepLogFollower
from shared.streams import START, entry_order, last_id, scan

SCAN_COUNT = 1000
CLOCK_SKEW_S = 300.0
"""Clocks of gateways and Redis differ by less: a request's tokens are not in entries this much older than it."""


@dataclass(slots=True)
class Survivor:
    """A live request: what is known of its output."""

    record: RequestRecord
    output: list[int]
    logprobs: list[float] = field(default_factory=list)
    """Of `output`, if it asked for them."""
    end_reason: EndReason | None = None
    is_over: bool = False
    """Its terminal event is in the log."""
    has_gap: bool = False
    """Tokens are missing in the log: how a worker ended it cannot be told to be the end of what is known."""
    num_cached_tokens: int = 0
    """As readers were told; 0 also if it was never admitted."""

    @property
    def request_id(self) -> str:
        return self.record.submission.request_id


@dataclass(frozen=True, slots=True)
class ColdStart:
    """A new core with the survivors in its queue, and the intake messages that concern them."""

    position: Position
    intake: list[IntakeMessage]


def fence_all(client: redis.Redis, keys: Keys, fence: FenceState, numbers: Mapping[str, int]) -> list[str]:
    """End the incarnation of every worker that has a holder; the instances that held them. `fence`: read under the
    present epoch; `numbers`: highest known incarnations, as in `WorkerDirectory`.

    Raises:
        Fenced: the epoch is stale.
    """
    holders = []
    for worker, state in fence.workers.items():
        if not state.holder:
            continue
        answer = fence_worker(
            client,
            keys,
            epoch=fence.epoch,
            worker=worker,
            expected=state.incarnation,
            new_holder="",
            reason="cold_start",
            highest=numbers.get(worker, 0),
        )
        if answer == 0:
            raise Fenced(f"epoch {fence.epoch} is stale")
        holders.append(state.holder)
    return holders


def rebuild(client: redis.Redis, keys: Keys, config: SchedulerConfig, *, tick: int, now: float) -> ColdStart:
    """The core as the records and the log have it, at tick `tick`. All workers must be fenced.

    Raises:
        RedisFailure: Redis did not answer.
    """
    log_id, intake_id = last_id(client, keys.steps), last_id(client, keys.intake)
    # Records are read after the end of intake is noted: who submits meanwhile is in intake, or in both; twice is once.
    survivors = _survivors(client, keys)
    _catch_up(client, keys, survivors, log_id)
    core = SchedulerCore(config)
    for survivor in survivors:
        if not survivor.is_over:
            told = survivor.num_cached_tokens or (0 if survivor.output else -1)
            core.now = min(now, survivor.record.submission.created)  # it goes on ageing
            submission, fingerprint = survivor.record.submission, survivor.record.fingerprint
            core.add_request(submission, survivor.output, survivor.end_reason, told, survivor.logprobs, fingerprint)
    intake = _stops_and_aborts(client, keys, {survivor.request_id for survivor in survivors}, intake_id)
    say = logs.warning if tick else logs.info
    say("cold_start", num_requests=len(core.requests), tick=tick, log_id=log_id, intake_id=intake_id)
    return ColdStart(Position(core, tick, intake_id, log_id, now), intake)


def _survivors(client: redis.Redis, keys: Keys) -> list[Survivor]:
    """Records without an end, oldest first."""
    found = []
    for names in _pages(client, keys):
        with client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(name)
            raws = pipe.execute(raise_on_error=False)
        for raw in raws:
            record = None if isinstance(raw, Exception) else parse_record(raw)
            if record is not None and record.final is None and is_sound(record.submission):
                told = record.num_cached_tokens
                found.append(Survivor(record, list(record.output), list(record.logprobs), num_cached_tokens=told))
    return sorted(found, key=lambda survivor: (survivor.record.submission.created, survivor.request_id))


def _pages(client: redis.Redis, keys: Keys) -> Iterator[list[bytes]]:
    pattern = keys.request_prefix + "*"
    cursor = 0
    while True:
        answer: Any = client.scan(cursor, match=pattern, count=SCAN_COUNT)
        cursor, names = answer
        if names:
            yield names
        if cursor == 0:
            return


def _starts_at(record: RequestRecord) -> str:
    """The entry of the step log after which the record's tokens may lie."""
    if record.log_id != START:
        return record.log_id
    return f"{max(0, int((record.submission.created - CLOCK_SKEW_S) * 1000))}-0"


def _catch_up(client: redis.Redis, keys: Keys, survivors: list[Survivor], until: str) -> None:
    """Add to every survivor's output what the log has after its record, in one pass."""
    waiting = sorted(survivors, key=lambda survivor: entry_order(_starts_at(survivor.record)), reverse=True)
    by_id = {survivor.request_id: survivor for survivor in survivors}
    follower = StepLogFollower()
    if not waiting:
        return
    for entry_id, payload in scan(client, keys.steps, after=_starts_at(waiting[-1].record), until=until):
        while waiting and entry_order(_starts_at(waiting[-1].record)) < entry_order(entry_id):
            record = waiting.pop().record
            follower.track(record.submission.request_id, len(record.output), record.seat)
        try:
            updates = follower.apply(decode_log(payload))
        except ProtocolError:
            continue
        for update in updates:
            survivor = by_id[update.request_id]
            survivor.output += update.tokens
            survivor.logprobs += update.logprobs
            survivor.has_gap |= update.gap
            if not survivor.has_gap:
                survivor.end_reason = update.end_reason or survivor.end_reason
            survivor.num_cached_tokens = update.num_cached_tokens or survivor.num_cached_tokens
            survivor.is_over |= update.event is not None and update.event.kind is EventKind.FINISHED


def _stops_and_aborts(client: redis.Redis, keys: Keys, live: set[str], until: str) -> list[IntakeMessage]:
    """What clients still want, from all of intake: applying it twice changes nothing."""
    found: list[IntakeMessage] = []
    for _, payload in scan(client, keys.intake, until=until):
        try:
            message = decode_intake(payload)
        except ProtocolError:
            continue
        if isinstance(message, Stop | Abort) and message.request_id in live:
            found.append(message)
    return found
