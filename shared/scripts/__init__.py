"""The scripts that change shared state, behind typed functions. Their rules are in infra/protocol.md, "Fence"; that of
`attach` is in `attachments.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b, sha1
from importlib.resources import files
from typing import Any, Protocol

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from shared.channel import Channel, Command, Words, join_words, pack_words
from shared.errors import IdempotencyConflict, QueueFull, RateLimited
from shared.keys import Keys
from shared.messages import Lease, ResponseHead, Submission, Submit, WorkerFenced, encode
from shared.records import LIVE_TTL_S
from shared.scripts.quotas import BURST_S, Quota
from shared.streams import START


class _Script:
    """Source and digest of one Lua file of this folder."""

    def __init__(self, name: str) -> None:
        self.source = files(__name__).joinpath(f"{name}.lua").read_bytes()
        # Redis names scripts by SHA-1; nothing is secret here.
        self.sha = sha1(self.source, usedforsecurity=False).hexdigest()


_SUBMIT, _ACQUIRE, _FENCED_APPEND = map(_Script, ("submit", "acquire", "fenced_append"))
_FENCE_WORKER, _FORGET_WORKERS = map(_Script, ("fence_worker", "forget_workers"))


def _run(client: redis.Redis, script: _Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
    try:
        return client.evalsha(script.sha, len(keys), *keys, *args)
    except NoScriptError:
        return client.eval(script.source, len(keys), *keys, *args)  # type: ignore[arg-type]


def _run_here(channel: Channel, script: _Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
    try:
        return channel.execute("EVALSHA", script.sha, len(keys), *keys, *args)
    except NoScriptError:
        return channel.execute("EVAL", script.source, len(keys), *keys, *args)


# ---------------------------------------------------------------- operations of a fenced append


@dataclass(frozen=True, slots=True)
class XAdd:
    """Append `payload` to a stream, and set the stream's time to live unless that is 0."""

    stream: str
    payload: bytes
    entry_id: str = "*"
    ttl_s: int = 0


@dataclass(frozen=True, slots=True)
class SetValue:
    """Set a string key and its time to live."""

    key: str
    value: bytes
    ttl_s: int


@dataclass(frozen=True, slots=True)
class SetFields:
    """Set fields of a hash (at most `MAX_FIELDS`) and its time to live."""

    key: str
    fields: Mapping[str, bytes]
    ttl_s: int


MAX_FIELDS = 1000
"""Lua unpacks at most 8,000 values."""

Operation = XAdd | SetValue | SetFields


class AppendStatus(StrEnum):
    """Outcome of a fenced append."""

    OK = "OK"
    ALREADY = "ALREADY"
    """Applied before; the reply had been lost. Success."""
    STALE = "STALE"
    """The number is not current, or the sequence is not the next one. Nothing was written."""


@dataclass(frozen=True, slots=True)
class TickCommit:
    """A tick with all of its consequences: one atomic append."""

    epoch: int
    tick: int
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class _AppendCall:
    """A `fenced_append`. Its operations, which may be long, are packed once, for the digest and for sending."""

    keys: list[str]
    fence: list[Any]
    operations: list[Any]
    packed: Words
    """The operations."""

    @property
    def command(self) -> bytes:
        head = pack_words(["EVALSHA", _FENCED_APPEND.sha, len(self.keys), *self.keys, *self.fence])
        return join_words(head, self.packed)


def _append_call(
    keys: Keys, operations: Sequence[Operation], *, number_field: str, number: int, name: str, sequence: int
) -> _AppendCall:
    """`name` is the sequence's field, `<name>_digest` that of its digest."""
    targets = [keys.fence]
    args: list[Any] = []
    for operation in operations:
        if isinstance(operation, XAdd):
            targets.append(operation.stream)
            args += ["X", operation.entry_id, operation.ttl_s, operation.payload]
        elif isinstance(operation, SetValue):
            targets.append(operation.key)
            args += ["S", operation.ttl_s, operation.value]
        else:
            targets.append(operation.key)
            args += ["H", operation.ttl_s, len(operation.fields)]
            for pair in operation.fields.items():
                args += pair
    packed = pack_words(args)
    digest = blake2b("\0".join(targets).encode(), digest_size=12)
    digest.update(packed.data)
    kind, _, worker = name.partition(":")
    digest_field = f"{kind}_digest:{worker}" if worker else f"{kind}_digest"
    fence = [number_field, number, name, sequence, digest_field, digest.hexdigest()]
    return _AppendCall(targets, fence, args, packed)


def commit_ticks(
    channel: Channel, keys: Keys, commits: Sequence[TickCommit], then: Sequence[Command] = ()
) -> list[AppendStatus]:
    """Commit ticks in order, in one pipeline. Commands `then` are sent with it; their replies are left to be received,
    unless something went wrong (`Channel.is_awaited`).

    Repeating the same call after a lost reply is safe: ticks that had landed answer ALREADY. A STALE in the answer
    means that leadership is lost.
    """
    commands: list[Command] = [
        _append_call(keys, c.operations, number_field="epoch", number=c.epoch, name="tick", sequence=c.tick).command
        for c in commits
    ]
    channel.send_all([*commands, *then])
    answers = channel.receive_all(len(commands))
    if any(isinstance(a, NoScriptError) for a in answers):
        channel.execute("SCRIPT", "LOAD", _FENCED_APPEND.source)
        answers = channel.execute_all(commands)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    statuses = [AppendStatus(a.decode()) for a in answers]
    return _forgive_landed(channel, keys, commits, statuses)


def _forgive_landed(
    channel: Channel, keys: Keys, commits: Sequence[TickCommit], statuses: list[AppendStatus]
) -> list[AppendStatus]:
    """A retry of several ticks: those before the last one that landed answer STALE although they landed.

    The epoch is checked first by the script, so under an unchanged epoch only this holder can have advanced the tick.
    """
    if AppendStatus.STALE not in statuses or len(commits) == 1:
        return statuses
    epoch, tick = (int(value or 0) for value in channel.execute("HMGET", keys.fence, "epoch", "tick"))
    return [
        AppendStatus.ALREADY if s is AppendStatus.STALE and epoch == c.epoch and c.tick <= tick else s
        for c, s in zip(commits, statuses, strict=True)
    ]


def publish_step(
    client: redis.Redis | Channel, keys: Keys, *, worker: str, incarnation: int, step_id: int, payload: bytes
) -> AppendStatus:
    """Append an encoded `StepResult` to the step log if `incarnation` is current and `step_id` the next one."""
    call = _append_call(
        keys,
        (XAdd(keys.steps, payload),),
        number_field=f"inc:{worker}",
        number=incarnation,
        name=f"step:{worker}",
        sequence=step_id,
    )
    arguments = [*call.fence, *call.operations]
    if isinstance(client, Channel):
        return AppendStatus(_run_here(client, _FENCED_APPEND, call.keys, arguments).decode())
    return AppendStatus(_run(client, _FENCED_APPEND, call.keys, arguments).decode())


# ---------------------------------------------------------------- leadership and fencing


def acquire(
    client: redis.Redis, keys: Keys, *, instance: str, ttl_ms: int, lease: Lease, held: int = 0, highest: int = 0
) -> int:
    """Take the leader's lease, or renew it under the epoch `held`; the epoch, or 0 if another instance has the lease.

    A new epoch is above `highest`, the highest that the caller knows, whatever Redis has forgotten.
    """
    arguments = [instance, ttl_ms, encode(lease), held, highest]
    return int(_run(client, _ACQUIRE, [keys.fence, keys.leader_lease], arguments))


def fence_worker(
    client: redis.Redis,
    keys: Keys,
    *,
    epoch: int,
    worker: str,
    expected: int,
    new_holder: str,
    reason: str,
    highest: int = 0,
) -> int:
    """End incarnation `expected` of `worker` (0: it never had one) and hand the next one to `new_holder`.

    The next one is above `highest`, too: an incarnation that Redis has forgotten must not be taken for it.
    The log, which will hold the worker's tokens, has a time to live from then on.
    Answers the new incarnation; 0 if `epoch` is stale; −(current incarnation) if that is not `expected`, as after
    an earlier try that landed while its reply was lost.
    """
    ended = max(expected, highest)
    entry = encode(WorkerFenced(worker=worker, incarnation=ended, reason=reason))
    arguments = [epoch, worker, new_holder, entry, expected, ended + 1, LIVE_TTL_S]
    return int(_run(client, _FENCE_WORKER, [keys.fence, keys.steps], arguments))


def forget_workers(client: redis.Redis, keys: Keys, *, epoch: int, incarnations: Mapping[str, int]) -> bool:
    """Take these workers out of the fence, as far as nobody holds them and this is their incarnation; whether `epoch`
    is current. Incarnations of such a name go on above `FenceState.forgotten`."""
    arguments = [epoch, *(word for pair in incarnations.items() for word in pair)]
    return bool(_run(client, _FORGET_WORKERS, [keys.fence], arguments))


@dataclass(frozen=True, slots=True)
class WorkerFence:
    """The fence's view of one worker."""

    incarnation: int
    holder: str
    step: int


@dataclass(frozen=True, slots=True)
class FenceState:
    """The fence, read at one moment."""

    epoch: int
    leader: str
    tick: int
    workers: dict[str, WorkerFence]
    refused: dict[str, int] = field(default_factory=dict)
    """Late writes that were refused: by worker, and `leader`."""
    redis_run_id: str = ""
    """Of the Redis process that a leader met last; empty: it met none yet."""
    forgotten: int = 0
    """The highest incarnation of all workers that are no longer here."""


_REFUSED = "refused:"
_REDIS_RUN_ID = "redis_run_id"


def read_fence(client: redis.Redis, keys: Keys) -> FenceState:
    """The whole fence; workers sorted by name."""
    raw: Any = client.hgetall(keys.fence)
    return parse_fence(raw)


def parse_fence(raw: Mapping[bytes, bytes]) -> FenceState:
    """As `read_fence`, from what HGETALL answered."""
    fields = {k.decode(): v.decode() for k, v in raw.items()}
    names = sorted(k.removeprefix("inc:") for k in fields if k.startswith("inc:"))
    workers = {
        name: WorkerFence(
            incarnation=int(fields[f"inc:{name}"]),
            holder=fields.get(f"holder:{name}", ""),
            step=int(fields.get(f"step:{name}", 0)),
        )
        for name in names
    }
    refused = {
        _writer(name.removeprefix(_REFUSED)): int(count) for name, count in fields.items() if name.startswith(_REFUSED)
    }
    return FenceState(
        epoch=int(fields.get("epoch", 0)),
        leader=fields.get("leader", ""),
        tick=int(fields.get("tick", 0)),
        workers=workers,
        refused=refused,
        redis_run_id=fields.get(_REDIS_RUN_ID, ""),
        forgotten=int(fields.get("forgotten", 0)),
    )


def note_redis(client: redis.Redis, keys: Keys, run_id: str) -> None:
    """A leader has met the Redis process `run_id`, and done what is to be done after a restart."""
    client.hset(keys.fence, _REDIS_RUN_ID, run_id)


def _writer(sequence_field: str) -> str:
    """Whose sequence it is: `tick` or `step:<worker>`."""
    return sequence_field.removeprefix("step:") if sequence_field != "tick" else "leader"


# ---------------------------------------------------------------- submission


@dataclass(frozen=True, slots=True)
class Submitted:
    """`accepted`: queued now. Otherwise the request that the idempotency key (or an id) already stands for."""

    accepted: bool
    request_id: str


_LIMITS = {"concurrency": "requests at a time", "tokens": "tokens per minute"}


class ScriptRunner(Protocol):
    """A client, as far as its scripts are concerned."""

    async def evalsha(self, sha: str, numkeys: int, *keys_and_args: Any) -> Any:
        """Run the script that Redis knows by this digest."""

    async def eval(self, script: bytes, numkeys: int, *keys_and_args: Any) -> Any:
        """Run this script."""


async def submit(
    client: redis.asyncio.Redis | ScriptRunner,
    keys: Keys,
    *submissions: Submission,
    ttl_s: int,
    idempotency_digest: str = "",
    body_digest: str = "",
    idempotency_ttl_s: int = 86_400,
    head: ResponseHead | None = None,
    window_s: float = 0.0,
    log_id: str = START,
    quota: Quota | None = None,
) -> Submitted:
    """Queue all `submissions` or none, atomically. Safe to repeat with the same ones.

    The first one's id stands for all of them; each counts by itself against the queue's caps. With a `head` they are a
    response that is given up unless somebody answers for it within `window_s`. `log_id`: an entry of the step log
    before all of their tokens, from which on whoever takes them over reads.

    Raises:
        QueueFull: a queue cap is reached.
        RateLimited: the caller's quota is used up.
        IdempotencyConflict: the key stands for another body.
    """
    first = submissions[0]
    claim = f"{body_digest}|{first.request_id}" if idempotency_digest else ""
    names = [keys.intake, keys.limits, keys.idempotency(first.tenant, idempotency_digest or "-")]
    quota = quota or Quota("-")
    names += [keys.windows, keys.callers_responses(quota.name), keys.bucket(quota.name)]
    names += [keys.request(s.request_id) for s in submissions]
    args: list[Any] = [ttl_s, claim, idempotency_ttl_s, "" if head is None else encode(head), int(window_s * 1000)]
    args += [log_id, quota.max_concurrent, quota.tokens_per_s, int(BURST_S * 1000)]
    for s in submissions:
        args += [s.request_id, encode(s), encode(Submit(request_id=s.request_id)), len(s.prompt_tokens) // 4]
    answer: Any
    try:
        answer = await client.evalsha(_SUBMIT.sha, len(names), *names, *args)
    except NoScriptError:
        answer = await client.eval(_SUBMIT.source, len(names), *names, *args)  # type: ignore[arg-type]
    status, detail = answer[0].decode(), answer[1].decode()
    if status == "LIMITED":
        raise RateLimited(f"this key's limit of {_LIMITS[detail]} is reached", retry_after_s=answer[2] / 1000)
    if status == "FULL":
        raise QueueFull(f"the queue is full ({detail}); try again later", whoever_asks=bool(answer[2]))
    if status == "CONFLICT":
        raise IdempotencyConflict("the idempotency key was used with another body")
    return Submitted(status == "ACCEPTED", detail)
