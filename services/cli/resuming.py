"""A client whose streams survive the death of the gateway that serves them.

    for chunk in ResumingStream("http://127.0.0.1:8000", "/v1/chat/completions", body):
        ...

The request is sent under an idempotency key and with a resume window. When the connection breaks, the stream is taken
up with `Last-Event-ID` at the same address, or at the next of several, so every chunk comes once and none is missing.
"""

import json
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import httpx

from services.cli.sse import DONE, SseParser
from shared.errors import PagewireError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
SILENCE_S = 60.0
"""A gateway that has nothing to say sends a comment every 10 s: after so much silence it is not there."""
PASSING = frozenset({"shutting_down", "redis_unreachable", "starting", "step_log_stalled", "internal_error"})
"""Codes of errors after which another gateway, or a later try, goes on with the stream."""
MOST_FAULTS = 3
"""Internal errors at one place of the stream: it is not the gateway then."""

Chunk = dict[str, Any]


class ServerError(PagewireError):
    """The server is unreachable or answered with an error; the message is for people."""


class _Interrupted(Exception):
    """The stream is not over, but this connection is."""


class ResumingStream:
    """Chunks of one streamed request, as decoded JSON. Closing the iterator early ends the request.

    `urls`: one address, or several gateways of one pool. `window_s`: how long a pause may be before it gives up; the
    server keeps the request as long.
    """

    def __init__(
        self, urls: str | Sequence[str], path: str, body: Chunk, *, api_key: str = "", window_s: float = 60.0
    ) -> None:
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        self._path = path
        self._body = {**body, "stream": True}
        self._window_s = window_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._key = uuid.uuid4().hex
        self._last_event_id = "0"
        self._url_index = 0
        self._is_answered = self._was_sent = False
        self._pause_s = FIRST_PAUSE_S
        self._alive_at = time.monotonic()
        self._fault = ("", 0)
        """Where the stream was when a gateway last failed of itself, and how often it did there."""
        self.request_id = ""
        """Known with the first answer."""
        self.num_resumed = 0
        """How often the stream was taken up again."""

    def __iter__(self) -> Generator[Chunk, None, None]:
        """
        Raises:
            ServerError: the server refused, failed, or did not come back within the window.
        """
        with httpx.Client(timeout=httpx.Timeout(10.0, read=SILENCE_S), headers=self._headers) as client:
            try:
                while True:
                    try:
                        yield from self._connection(client)
                        return
                    except (httpx.TransportError, _Interrupted) as error:
                        self._wait(error)
            except (GeneratorExit, KeyboardInterrupt):
                self._end(client)
                raise

    @property
    def _url(self) -> str:
        return self._urls[self._url_index % len(self._urls)]

    def _connection(self, client: httpx.Client) -> Generator[Chunk, None, None]:
        """Chunks of one connection, to the end of the stream."""
        with self._opened(client) as response:
            self._check(response)
            self._is_answered, self.request_id = True, response.headers.get("x-request-id", "")
            parser = SseParser()
            for data in response.iter_raw():
                self._alive_at, self._pause_s = time.monotonic(), FIRST_PAUSE_S
                for event in parser.feed(data):
                    if event.data == DONE:
                        return
                    chunk = json.loads(event.data)
                    self._check_chunk(chunk)
                    self._last_event_id = event.id.decode() or self._last_event_id
                    yield chunk
        raise _Interrupted("the stream broke off")

    def _opened(self, client: httpx.Client) -> AbstractContextManager[httpx.Response]:
        headers = {"X-Resume-Window": f"{self._window_s:g}"}
        if not self.request_id:
            headers["Idempotency-Key"] = self._key
            return client.stream("POST", self._url + self._path, json=self._body, headers=headers)
        self.num_resumed += 1
        headers["Last-Event-ID"] = self._last_event_id
        return client.stream("GET", f"{self._url}/v1/requests/{self.request_id}/stream", headers=headers)

    def _check(self, response: httpx.Response) -> None:
        """An error that may pass is one only for a request that was, or may have been, accepted before."""
        if response.status_code == httpx.codes.OK:
            return
        response.read()
        if response.status_code == httpx.codes.NOT_FOUND and self.num_resumed:
            raise ServerError("the stream broke off, and the server knows it no more")
        may_be_accepted = self.request_id or self._was_sent
        # Its place among the streams of its key may still be that of the connection that broke.
        is_crowded = response.status_code == httpx.codes.TOO_MANY_REQUESTS and self.request_id
        if is_crowded or (response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR and may_be_accepted):
            raise _Interrupted(f"HTTP {response.status_code}")
        raise ServerError(f"HTTP {response.status_code}: {message_of(response)}")

    def _check_chunk(self, chunk: Chunk) -> None:
        error = chunk.get("error")
        if error and error.get("code") in PASSING and not self._is_hopeless(error["code"]):
            raise _Interrupted(str(error["code"]))
        if error:
            raise ServerError(str(error.get("message", "error")))

    def _is_hopeless(self, code: str) -> bool:
        """Whether gateways failed at this place again and again."""
        if code != "internal_error":
            return False
        at, count = self._fault
        self._fault = (self._last_event_id, count + 1 if at == self._last_event_id else 1)
        return self._fault[1] > MOST_FAULTS

    def _wait(self, error: Exception) -> None:
        """Before the next try, elsewhere if there are several addresses."""
        if self._is_answered and not self.request_id:  # no Pagewire: it would begin anew
            raise ServerError("the stream broke off") from error
        self._was_sent |= not isinstance(error, httpx.ConnectError)
        never_came = not self._was_sent and not self.request_id
        is_over = time.monotonic() - self._alive_at > self._window_s
        if is_over or (never_came and self._url_index + 1 >= len(self._urls)):
            raise ServerError(f"{self._url}: {error}") from error
        self._url_index += 1
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _end(self, client: httpx.Client) -> None:
        """Nobody wants the rest."""
        if self.request_id:
            with suppress(httpx.HTTPError):
                client.delete(f"{self._url}/v1/requests/{self.request_id}", timeout=2.0)


def message_of(response: httpx.Response) -> str:
    """What an error answer says, for people."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
