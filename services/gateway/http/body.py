"""Reading a request body: size before content, JSON before meaning."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from shared.errors import InvalidRequest, QueueFull

DRAIN_FACTOR = 8
DRAIN_S = 2.0
"""A body that is too large is still read, and thrown away, up to 8 times the limit and 2 s: closing a connection that
the client is writing to would destroy the answer on its way."""
BODY_S = 60.0


class BodyRoom:
    """Memory for the bodies that are here at one time, of all requests that are not queued yet."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self.taken = 0

    @contextmanager
    def place(self) -> Iterator[Callable[[int], None]]:
        """Of one body, until the block ends: a function that takes room for its next bytes.

        It raises:
            QueueFull: there is none.
        """
        own = 0

        def take(size: int) -> None:
            nonlocal own
            if self.taken + size > self._num_bytes:
                raise QueueFull("too many request bodies at a time; try again later")
            own += size
            self.taken += size

        try:
            yield take
        finally:
            self.taken -= own


async def read_body(receive: Receive, headers: Headers, limit: int, take: Callable[[int], None]) -> bytes:
    """The whole body, sized or chunked; `take` finds room for what comes.

    Raises:
        InvalidRequest: 413, more than `limit` bytes; 408, it took too long.
        QueueFull: no room.
        ClientDisconnect: the client left.
    """
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(receive, headers, limit, take)
    except TimeoutError:
        message = f"the body did not come within {BODY_S:g} s"
        raise InvalidRequest(message, code="request_timeout", status=408) from None


async def _read(receive: Receive, headers: Headers, limit: int, take: Callable[[int], None]) -> bytes:
    if int(headers.get("content-length", 0)) > limit:
        if "expect" not in headers:  # a client that asks first is told at once
            await _drain(receive, limit)
        raise _too_large(limit)
    chunks, size, more = [], 0, True
    while more:
        chunk, more = await _next_chunk(receive)
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            await _drain(receive, limit)
            raise _too_large(limit)
        take(len(chunk))
    return b"".join(chunks)


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN, no Infinity, no ill-formed Unicode, no bottomless nesting.

    Raises:
        InvalidRequest: 400.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value


async def _next_chunk(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def _drain(receive: Receive, limit: int) -> None:
    size, more = 0, True
    try:
        async with asyncio.timeout(DRAIN_S):
            while more and size < limit * DRAIN_FACTOR:
                chunk, more = await _next_chunk(receive)
                size += len(chunk)
    except (TimeoutError, ClientDisconnect):
        pass


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"the body is larger than {limit} bytes", code="request_too_large", status=413)
