"""A recording is a folder of files; a file is MessagePack, message after message, with nothing in between.

    Header        where the core stood: configuration, snapshot, the submissions of its live requests
    TickRecord    tick n + 1: what it was told, what it decided
    TickRecord    tick n + 2
    …
    Loss          if ticks behind the last one could not be recorded
    End           if the recorder was closed, so that nothing behind the last one is missing

Every file stands by itself: it begins with the whole state. A new one begins with every leader, after a gap, and when
the last one is large. A leader that takes over records the ticks that it replays from Redis too, so files may overlap,
and what a killed leader had not written yet is in its successor's file. `msgpack.Unpacker` streams a file without any
code of ours: structs are arrays `[tag, fields…]`.

A recording holds the token ids of prompts and outputs, which are their text to whoever has the tokenizer.
"""

import msgspec

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.outcomes import Finished
from services.scheduler.core.ticks import TickOutcome
from shared.errors import PagewireError
from shared.messages import (
    Final,
    IntakeMessage,
    LogMessage,
    Message,
    Part,
    RequestEvent,
    StepPlan,
    Submission,
    Tick,
    encode,
)

SUFFIX = ".msgpack"
NO_PLAN = msgspec.Raw(b"\xc0")


class RecordingError(PagewireError):
    """The recording cannot be read, or by another version only."""


class Header(Message, frozen=True, tag="recording/1"):
    """The first message of a file."""

    pool: str
    epoch: int
    cause: str
    """`takeover`, `cold_start`, `rotation`, or `gap`: ticks before this file could not be recorded."""
    tick: int
    """The core's state is that after this tick."""
    now: float
    """Time of that tick."""
    config: dict[str, bool | int | float | str]
    snapshot: bytes
    submissions: tuple[Submission, ...]
    """Of all live requests."""


class Ended(Part, frozen=True):
    """A request's end."""

    request_id: str
    final: Final
    output: bytes
    """Packed int32."""
    logprobs: bytes = b""
    """Packed float32."""


class TickRecord(Message, frozen=True, tag="recorded-tick/1"):
    """One committed tick."""

    tick: Tick
    log: tuple[LogMessage, ...]
    intake: tuple[IntakeMessage, ...]
    submissions: tuple[Submission, ...]
    """That `intake` points to, as far as they were found."""
    worker: str
    """Whose plan it is; empty: there is none."""
    incarnation: int
    plan: msgspec.Raw
    """The `StepPlan` exactly as it was committed; nil if there is none."""
    events: tuple[RequestEvent, ...]
    cached: tuple[tuple[str, int], ...]
    ended: tuple[Ended, ...]


class End(Message, frozen=True, tag="recorded-end/1"):
    """The last message of a recorder that was closed. Without it the process still runs, or was killed, or the disk
    was full: ticks may be missing."""


class Loss(Message, frozen=True, tag="recorded-loss/1"):
    """The last message of a file behind which ticks were lost."""

    tick: int
    """The first of them."""
    reason: str


def config_of(header: Header) -> SchedulerConfig:
    """The configuration under which the recording was made.

    Raises:
        RecordingError: this version does not know it.
    """
    try:
        return msgspec.convert(header.config, SchedulerConfig)
    except (msgspec.ValidationError, PagewireError) as error:
        raise RecordingError(f"the recording's configuration is of another version: {error}") from error


def config_dict(config: SchedulerConfig) -> dict[str, bool | int | float | str]:
    return {name: getattr(config, name) for name in config.__slots__}


def plan_bytes(outcome: TickOutcome) -> bytes:
    """The plan as it is committed; nil if there is none."""
    return bytes(NO_PLAN) if outcome.plan is None else encode(outcome.plan.plan)


def ended_of(finished: Finished) -> Ended:
    return Ended(finished.request_id, finished.final, finished.output, finished.logprobs)


def decode_plan(record: TickRecord) -> StepPlan | None:
    """The recorded plan.

    Raises:
        RecordingError: its bytes are no plan.
    """
    if record.plan == NO_PLAN:
        return None
    try:
        return _plans.decode(record.plan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"the plan of tick {record.tick.number} is damaged: {error}") from error


_plans = msgspec.msgpack.Decoder(StepPlan)
