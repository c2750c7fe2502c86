"""Answers to generation requests: whole or as a stream, given up as soon as the client is gone.

Starlette cancels neither a plain handler nor a submission when the client leaves, so both answers watch the connection
themselves.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
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
from services.gateway.http.event_ids import Received
from services.gateway.http.shapes import Shape, usage
from services.gateway.streams.generation import Generation, GenerationFailed
from services.gateway.streams.intake import AlreadySubmitted
from services.gateway.streams.sequences import Progress
from shared.messages import FinishReason


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What the client asked for."""

    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What is answered, and from where on."""

    generation: Generation
    shape: Shape
    options: StreamOptions
    received: Received


Reopen = Callable[[str], Awaitable[Answer]]
"""Opens the request that an idempotency key stands for, by its id."""


class GenerationResponse(Response):
    """Runs one generation while it answers."""

    background = None

    def __init__(self, answer: Answer, span: Span, request_id: str, reopen: Reopen) -> None:
        self._take(answer)
        self._span = span
        self._request_id = request_id
        self._reopen = reopen

    def _take(self, answer: Answer) -> None:
        self._generation = answer.generation
        self._shape = answer.shape
        self._options = answer.options
        self._received = answer.received

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._until_disconnect(self._answer(scope, receive, send), scope, receive)
        except Exception as error:
            self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            self._span.set_attribute("gen_ai.usage.input_tokens", self._generation.num_prompt_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", self._generation.num_output_tokens)
            self._span.end()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _enter(self, stack: AsyncExitStack, scope: Scope) -> Generation:
        """Submit; or go on with the request that was submitted under the same key before, which gives its id."""
        try:
            generation = await stack.enter_async_context(self._generation)
        except AlreadySubmitted as known:
            self._take(await self._reopen(known.response_id))
            self._request_id = scope["state"]["request_id"] = known.response_id
            generation = await stack.enter_async_context(self._generation)
        scope["state"]["place"].leave()
        return generation

    async def _until_disconnect(self, work: Coroutine[Any, Any, None], scope: Scope, receive: Receive) -> None:
        """Run `work`, which waits while the client does not read; give it up when the client leaves, or was cut.

        Raises:
            ClientDisconnect: it left.
        """
        answer, watch = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((answer, watch), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self._generation.cause = "slow_client" if "is_slow" in scope["state"] else "client_disconnect"
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
        async with AsyncExitStack() as stack:
            generation = await self._enter(stack, scope)
            while not generation.is_done:
                for progress in await generation.next():
                    texts.setdefault(progress.choice, []).append(progress.text)
                    ends[progress.choice] = progress
        choices = [_with_text(ends[index], "".join(texts[index])) for index in sorted(ends)]
        if all(c.finish_reason == FinishReason.TIMEOUT and not c.num_tokens for c in choices):
            raise GenerationFailed("the request's deadline passed before its first token", code="deadline_exceeded")
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
        answer: Answer,
        span: Span,
        request_id: str,
        reopen: Reopen,
        *,
        ping_interval_s: float,
        stream_interval_s: float,
    ) -> None:
        super().__init__(answer, span, request_id, reopen)
        self._ping_interval_s = ping_interval_s
        self._stream_interval_s = stream_interval_s
        self._frames: dict[int, sse.TextFrame] = {}

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            generation = await self._enter(stack, scope)
            await send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
            try:
                if self._received.is_nothing:
                    await _write(send, self._openings())
                await self._follow(generation, send)
            except Exception as error:
                await _write(send, self._error(error))
                self._generation.cause = error.code if isinstance(error, GenerationFailed) else "internal_error"
                return
        await send({"type": "http.response.body", "body": self._closing(), "more_body": False})

    async def _follow(self, generation: Generation, send: Send) -> None:
        last_sent = time.monotonic()
        while not generation.is_done:
            news = await generation.next(self._ping_interval_s)
            events = b"".join(self._event(p) for p in news if self._is_news(p))
            if not events and time.monotonic() - last_sent >= self._ping_interval_s:
                events = sse.PING
            if events:
                last_sent = time.monotonic()
                await _write(send, events)
                if generation.is_behind:  # the tokens of several steps in one event cost no more than those of one
                    await asyncio.sleep(last_sent + self._stream_interval_s - time.monotonic())

    def _is_news(self, progress: Progress) -> bool:
        return not self._received.ended[progress.choice] and bool(progress.text or progress.finish_reason)

    def _openings(self) -> bytes:
        chunks = [self._shape.opening(index) for index in range(len(self._received.counts))]
        return b"".join(self._encode(chunk) for chunk in chunks if chunk is not None)

    def _event(self, progress: Progress) -> bytes:
        self._received.counts[progress.choice] = progress.num_tokens
        self._received.ended[progress.choice] = progress.finish_reason is not None
        if progress.finish_reason is not None or self._options.continuous_usage:
            return self._encode(self._shape.chunk(progress))
        frame = self._frames.get(progress.choice)
        if frame is None:
            model = Progress(progress.choice, sse.MARK, 0)
            frame = self._frames[progress.choice] = sse.TextFrame(self._complete(self._shape.chunk(model)))
        return frame.event(progress.text, self._received.event_id)

    def _encode(self, chunk: dict[str, Any]) -> bytes:
        return sse.event(self._complete(chunk), self._received.event_id)

    def _complete(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if self._options.continuous_usage:
            chunk["usage"] = self._usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        return usage(generation.num_prompt_tokens, sum(self._received.counts), generation.num_cached_tokens)

    def _closing(self) -> bytes:
        if not self._options.include_usage or self._received.has_usage:
            return sse.DONE
        chunk = {**self._shape.bare_chunk(), "usage": self._usage()}
        self._received.has_usage = True
        return sse.event(chunk, self._received.event_id) + sse.DONE

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
