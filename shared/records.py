"""The request record: what was submitted, the committed output folded in, the end."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import redis
import redis.asyncio

from shared.errors import ProtocolError
from shared.keys import Keys
from shared.messages import Decoder, Final, ResponseHead, Submission, encode
from shared.packing import unpack_float32, unpack_int32
from shared.streams import START

LIVE_TTL_S = 86_400
"""A record holds text, so even one that nobody ends disappears after a day."""

_submission: Decoder[Submission] = Decoder(Submission)
_final: Decoder[Final] = Decoder(Final)
_head: Decoder[ResponseHead] = Decoder(ResponseHead)


UNKNOWN_STEP = -1
"""The next step, whichever it is, is no gap."""


class Seat(NamedTuple):
    """Where a request sits: readers who start at the record's log id know its row by it."""

    worker: str
    incarnation: int
    row: int
    step: int = UNKNOWN_STEP
    """The incarnation's last one up to there: who meets a later one than the next lacks what was between."""


NO_SEAT: bytes = msgspec.msgpack.encode(None)
"""A record's `seat` while the request has none."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """`output` holds the committed tokens up to `log_id`, which lies before all of them at first; `final` is set once
    the request has ended."""

    submission: Submission
    output: "array[int]"
    log_id: str
    seat: Seat | None
    final: Final | None
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the request was first admitted, as far as `log_id` tells."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    """Log-probability of each token of `output`, if `params.with_logprobs`; else empty."""
    head: ResponseHead | None = None
    """If it is the first request of a response."""
    fingerprint: str = ""
    """Numerics by which `output` was computed, as far as known."""


def choice_id(request_id: str, choice: int) -> str:
    """The id of one choice of a request; each is a request of its own, with its own record."""
    return f"{request_id}#{choice}" if choice else request_id


def fold_fields(
    output: bytes,
    log_id: str,
    seat: Seat | None,
    num_cached_tokens: int = 0,
    logprobs: bytes = b"",
    fingerprint: str = "",
) -> dict[str, bytes]:
    """Fields that bring a live record up to `log_id`. `logprobs`: packed float32, one per output token, or none;
    `fingerprint`: numerics by which they were computed, if known."""
    return {
        "output": output,
        "log_id": log_id.encode(),
        "seat": NO_SEAT if seat is None else msgspec.msgpack.encode(seat),
        "cached": str(num_cached_tokens).encode(),
        **({"logprobs": logprobs} if logprobs else {}),
        **({"fingerprint": fingerprint.encode()} if fingerprint else {}),
    }


def final_fields(output: bytes, log_id: str, final: Final, logprobs: bytes = b"") -> dict[str, bytes]:
    """Fields that end a record; `logprobs` as in `fold_fields`."""
    ended = {"output": output, "log_id": log_id.encode(), "seat": NO_SEAT, "final": encode(final)}
    return ended | ({"logprobs": logprobs} if logprobs else {})


def parse_record(raw: dict[bytes, bytes]) -> RequestRecord | None:
    """A record from its hash; None if it is absent or unreadable."""
    if b"submission" not in raw:
        return None
    try:
        final = _final.decode(raw[b"final"]) if b"final" in raw else None
        seat = msgspec.msgpack.decode(raw[b"seat"], type=Seat | None) if b"seat" in raw else None
        output = unpack_int32(raw.get(b"output", b""))
        return RequestRecord(
            submission=_submission.decode(raw[b"submission"]),
            output=output,
            log_id=raw.get(b"log_id", START.encode()).decode(),
            seat=seat,
            final=final,
            num_cached_tokens=int(raw.get(b"cached", b"0")) if final is None else final.num_cached_tokens,
            logprobs=unpack_float32(raw.get(b"logprobs", b"")),
            head=_head.decode(raw[b"head"]) if b"head" in raw else None,
            fingerprint=raw.get(b"fingerprint", b"").decode(),
        )
    except (ProtocolError, msgspec.MsgspecError, ValueError):
        return None


def read_record(client: redis.Redis, keys: Keys, request_id: str) -> RequestRecord | None:
    raw: Any = client.hgetall(keys.request(request_id))
    return parse_record(raw)


async def read_head(client: redis.asyncio.Redis, keys: Keys, response_id: str) -> ResponseHead | None:
    """What a response consists of; None if its record is gone or unreadable."""
    return next(iter(await read_heads(client, keys, [response_id])), None)


async def read_heads(client: redis.asyncio.Redis, keys: Keys, response_ids: Sequence[str]) -> list[ResponseHead]:
    """Those that are there, in one round trip."""
    async with client.pipeline(transaction=False) as pipe:
        for response_id in response_ids:
            pipe.hget(keys.request(response_id), "head")
        values: list[Any] = await pipe.execute()
    heads = []
    for value in values:
        with suppress(ProtocolError):
            heads += [] if value is None else [_head.decode(value)]
    return heads


async def live_heads(client: redis.asyncio.Redis, keys: Keys, response_ids: Sequence[str]) -> list[ResponseHead]:
    """Those with a request that has not ended. A response may be in `windows` longer: its gateway died."""
    heads = await read_heads(client, keys, response_ids)
    async with client.pipeline(transaction=False) as pipe:
        for request_id in (request_id for head in heads for request_id in head.request_ids):
            pipe.hexists(keys.request(request_id), "final")
        ends: Iterator[Any] = iter(await pipe.execute())
    return [head for head in heads if 0 in [next(ends) for _ in head.request_ids]]


def read_submissions(client: redis.Redis, keys: Keys, request_ids: Sequence[str]) -> dict[str, Submission]:
    """Submissions by id, in one round trip; those whose record is absent or unreadable are missing."""
    if not request_ids:
        return {}
    with client.pipeline(transaction=False) as pipe:
        for request_id in request_ids:
            pipe.hget(keys.request(request_id), "submission")
        values = pipe.execute(raise_on_error=False)
    found: dict[str, Submission] = {}
    for request_id, value in zip(request_ids, values, strict=True):
        if isinstance(value, redis.ResponseError) and str(value).startswith("WRONGTYPE"):
            continue  # no record: asking again would not help
        if isinstance(value, Exception):
            raise value
        try:
            if value is not None:
                found[request_id] = _submission.decode(value)
        except ProtocolError:
            continue
    return found
