"""Streams over requests that were submitted before: by another stream, to another gateway, or under the same key.

Idempotency-Key   a POST that is repeated with it attaches to the running or ended request instead of a second one
X-Resume-Window   seconds for which a request goes on when its client leaves; such a key asks for it too
Last-Event-ID     what the client has received: the rest follows (also with a POST under a key that is known: the
                  beginning of one answer and the rest of another are no text)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.datastructures import Headers

from services.gateway.http.event_ids import HEADER, parse_last_event_id
from services.gateway.http.responses import Answer, StreamOptions
from services.gateway.http.shapes import shape_of
from services.gateway.state import GatewayState
from services.gateway.streams.catch_up import read_records
from services.gateway.streams.custody import Attachment
from services.gateway.streams.generation import Generation
from shared.errors import IdempotencyConflict, InvalidRequest, NoSuchResponse, Unavailable
from shared.messages import ResponseHead
from shared.records import RequestRecord
from shared.redis_client import RedisFailure
from shared.scripts.quotas import Quota

MAX_KEY = 255
MAX_WINDOW_S = 3600.0
MAX_ID = 128
"""Characters of a request's id."""
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Wish:
    """What the headers say."""

    key_digest: str
    """Of the idempotency key; empty without one."""
    window_s: float
    is_resumable: bool
    """Whether the request goes on when its client leaves."""
    last_event_id: str | None


def read_wish(headers: Headers, default_window_s: float) -> Wish:
    """
    Raises:
        InvalidRequest: a header is malformed.
    """
    key, window_s = _key(headers), _window(headers)
    return Wish(
        key_digest=_digest(key.encode()) if key else "",
        window_s=default_window_s if window_s is None else window_s,
        is_resumable=bool(key) or window_s is not None,
        last_event_id=headers.get(HEADER),
    )


def body_digest(kind: str, body: Any) -> str:
    """Equal for bodies that mean the same: the order of an object's fields means nothing."""
    return _digest(msgspec.json.encode([kind, body], order="sorted"))


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _key(headers: Headers) -> str:
    key = headers.get("idempotency-key")
    if key is None:
        return ""
    if not (1 <= len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        message = f"Idempotency-Key: 1 to {MAX_KEY} printable ASCII characters"
        raise InvalidRequest(message, param="Idempotency-Key")
    return key


def _window(headers: Headers) -> float | None:
    text = headers.get("x-resume-window")
    if text is None:
        return None
    seconds = float(text) if _SECONDS.fullmatch(text.strip()) else 0.0
    if not 1 <= seconds <= MAX_WINDOW_S:
        raise InvalidRequest(f"X-Resume-Window: seconds, 1 to {MAX_WINDOW_S:g}", param="X-Resume-Window")
    return seconds


async def open_response(
    gateway: GatewayState, response_id: str, tenant: str, wish: Wish, started_at: float, quota: Quota | None
) -> Answer:
    """The rest of a response; nothing is taken over before its generation is entered.

    Raises:
        NoSuchResponse: unknown, of another tenant, or its records have expired.
        InvalidRequest: its `Last-Event-ID` is none of this response.
        Unavailable: Redis does not answer.
    """
    head, records = await find_response(gateway, response_id, tenant)
    submissions = [record.submission for record in records]
    window_s = wish.window_s if wish.is_resumable or not head.window_s else head.window_s
    is_resumable = wish.is_resumable or head.window_s > 0
    attachment = Attachment(response_id, window_s, is_resumable=is_resumable)
    generation = Generation(gateway.engine, submissions, head, attachment, started_at, quota=quota, is_resumed=True)
    received = parse_last_event_id(wish.last_event_id, generation.most_tokens)
    generation.skip(received.counts)
    options = StreamOptions(head.include_usage, head.continuous_usage)
    return Answer(generation, shape_of(submissions[0]), options, received)


async def check_is_known(gateway: GatewayState, tenant: str, wish: Wish, most_tokens: Sequence[int]) -> None:
    """A streaming POST whose client has a part of the answer can only go on with that answer, never begin another one.

    Raises:
        InvalidRequest: its `Last-Event-ID` comes without a key, or is none of such a response.
        IdempotencyConflict: nothing is known under its key.
        Unavailable: Redis does not answer.
    """
    if parse_last_event_id(wish.last_event_id, most_tokens).is_nothing:
        return
    if not wish.key_digest:
        message = "Last-Event-ID: a POST goes on with an answer only under the Idempotency-Key that it was sent with"
        raise InvalidRequest(message, param="Last-Event-ID")
    intake = gateway.engine.intake
    try:
        held = await intake.client.get(intake.keys.idempotency(tenant, wish.key_digest))
    except RedisFailure as error:
        raise Unavailable("the message log is unreachable", reason="redis_unreachable") from error
    if held is None:
        raise IdempotencyConflict("no answer is known under this idempotency key that could be gone on with")


async def find_response(
    gateway: GatewayState, response_id: str, tenant: str
) -> tuple[ResponseHead, list[RequestRecord]]:
    """What it consists of, and the records of that.

    Raises:
        NoSuchResponse, Unavailable: as `open_response`.
    """
    intake = gateway.engine.intake
    if not (len(response_id) <= MAX_ID and response_id.isascii() and response_id.isprintable()):
        raise NoSuchResponse("?")
    try:
        found = await read_records(intake.client, intake.keys, [response_id])
        first = found[response_id]
        head = None if first is None else first.head
        if head is None or head.tenant != tenant:
            raise NoSuchResponse(response_id)
        found |= await read_records(intake.client, intake.keys, head.request_ids[1:])
    except RedisFailure as error:
        raise Unavailable("the message log is unreachable", reason="redis_unreachable") from error
    records = [record for record in found.values() if record is not None]
    if len(records) < len(head.request_ids):
        raise NoSuchResponse(response_id)
    return head, records
