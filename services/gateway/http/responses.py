"""Answers to generation requests: whole or as a stream, given up as soon as the client is gone.

Starlette cancels neither a plain handler nor a submission when the client leaves, so both answers watch the connection
themselves.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from opentelemetry.trace import Span, Status, StatusCode
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.cancelling import cancel_and_wait
from services.gateway.http import sse
from services.gateway.http.errors import error_body, internal_message, log_failure
from services.gateway.http.shapes import Shape, usage
from services.gateway.streams.generation import Generation, GenerationFailed
from services.gateway.streams.sequences import Progress


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What the client asked for."""

    include_usage: bool = False
    continuous_usage: bool = False


class GenerationResponse(Response):
    """Runs one generation while it answers."""

    background = None

    def __init__(self, generation: Generation, shape: Shape, span: Span, request_id: str) -> None:
        self._generation = generation
        self._shape = shape
        self._span = span
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._until_disconnect(self._answer(scope, receive, send), receive)
        except Exception as error:
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            self._span.set_attribute("gen_ai.usage.input_tokens", self._generation.num_prompt_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", self._generation.num_output_tokens)
            self._span.end()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _until_disconnect(self, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Run `work`; give it up when the client leaves.

        Raises:
            ClientDisconnect: it left.
        """
        answer, watch = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._generation.cause = "client_disconnect"
        finally:
            await cancel_and_wait(answer, watch)
        if answer.cancelled():
            raise ClientDisconnect
        answer.result()


class WholeResponse(GenerationResponse):
    """One JSON body when everything is there."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: dict[int, list[str]] = {}
        ends: dict[int, Progress] = {}
        async with self._generation as generation:
            while not generation.is_done:
                for progress in await generation.next():
                    texts.setdefault(progress.choice, []).append(progress.text)
                    ends[progress.choice] = progress
        choices = [_with_text(ends[index], "".join(texts[index])) for index in sorted(ends)]
        body = self._shape.whole(choices)
        body["usage"] = usage(generation.num_prompt_tokens, generation.num_output_tokens, generation.num_cached_tokens)
        await Response(msgspec.json.encode(body), media_type="application/json")(scope, receive, send)


class StreamResponse(GenerationResponse):
    """Server-sent events as the tokens come.

    A failure after the first byte becomes one error event; the body is then cut, not closed, so that nobody takes it
    for a complete one.
    """

    def __init__(
        self,
        generation: Generation,
        shape: Shape,
        span: Span,
        request_id: str,
        *,
        options: StreamOptions,
        ping_interval_s: float,
    ) -> None:
        super().__init__(generation, shape, span, request_id)
        self._options = options
        self._ping_interval_s = ping_interval_s
        self._counts = [0] * generation.num_choices

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            await send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
            try:
                await _write(send, self._openings())
                await self._follow(generation, send)
            except Exception as error:
                await _write(send, self._error(error))
                if isinstance(error, GenerationFailed):
                    self._generation.cause = error.code
                return
        await send({"type": "http.response.body", "body": self._closing(), "more_body": False})

    async def _follow(self, generation: Generation, send: Send) -> None:
        last_sent = time.monotonic()
        while not generation.is_done:
            news = await generation.next(self._ping_interval_s)
            events = b"".join(self._event(p) for p in news if p.text or p.finish_reason is not None)
            if not events and time.monotonic() - last_sent >= self._ping_interval_s:
                events = sse.PING
            if events:
                last_sent = time.monotonic()
                await _write(send, events)

    def _openings(self) -> bytes:
        chunks = [self._shape.opening(index) for index in range(len(self._counts))]
        return b"".join(self._encode(chunk) for chunk in chunks if chunk is not None)

    def _event(self, progress: Progress) -> bytes:
        self._counts[progress.choice] = progress.num_tokens
        return self._encode(self._shape.chunk(progress))

    def _encode(self, chunk: dict[str, Any]) -> bytes:
        if self._options.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return sse.event(chunk, sse.event_id(self._counts))

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return usage(generation.num_prompt_tokens, sum(self._counts), generation.num_cached_tokens)

    def _closing(self) -> bytes:
        if not self._options.include_usage:
            return sse.DONE
        chunk = {**self._shape.bare_chunk(), "usage": self._usage()}
        return sse.event(chunk, sse.event_id(self._counts)) + sse.DONE

    def _error(self, error: Exception) -> bytes:
        self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        if isinstance(error, GenerationFailed):
            return sse.event(error_body(error.message, kind="server_error", code=error.code))
        log_failure(error, self._request_id)
        return sse.event(error_body(internal_message(self._request_id), kind="server_error", code="internal_error"))


def _with_text(end: Progress, text: str) -> Progress:
    return Progress(end.choice, text, end.num_tokens, end.finish_reason, end.stop_reason)


async def _write(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
