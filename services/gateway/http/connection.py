"""A connection that cannot be used to fill memory or to hold a place for ever: the head of a request is bounded, and so
is the time for which an answer waits for its client."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of request line and headers."""
HEAD_S = 10.0
"""For sending them."""
LEAST_TAKEN = 16 * 1024
"""Bytes of what waits that a client takes within the gateway's `write_timeout_s`; who takes less has left."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_BODY = (
    b'{"error":{"message":"the headers are larger than %d bytes","type":"invalid_request_error",'
    b'"param":null,"code":"headers_too_large"}}' % MAX_HEAD_BYTES
)


class HeadTooLarge(Exception):
    """Ends the parsing of a request."""


class BoundedProtocol(HttpToolsProtocol):
    """Counts what comes before the body and how long it takes. Cuts a client that does not take its answer, and puts
    `is_slow` into the state of its request."""

    _head_bytes = 0
    _raw_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._raw_bytes += len(data)
            if self._timer is None:
                self._start_timer()
        super().data_received(data)
        if self._in_head and self._raw_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if not self.flow.write_paused:
            self._stop_write_timer()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)  # colon, space, line break
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._raw_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():  # nobody waits for the rest of it, and closing does
            self._start_write_timer()

    def send_400_response(self, msg: str) -> None:
        """Also called for what our own callbacks raise."""
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadTooLarge

    def _refuse(self) -> None:
        self.transport.write(_TOO_LARGE % (len(_BODY), _BODY))
        self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_S, self._on_slow_head)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_slow_head(self) -> None:
        """An idle connection is uvicorn's to close; one that dribbles a head is ours."""
        self._timer = None
        if self._in_head and not self.transport.is_closing():
            self.transport.abort()

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            timeout_s = self.app_state["gateway"].settings.write_timeout_s
            unsent = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(timeout_s, self._on_slow_reader, unsent)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_slow_reader(self, unsent: int) -> None:
        """`unsent` bytes waited when the time began; nothing was written since."""
        self._write_timer = None
        left = self.transport.get_write_buffer_size()
        if left and unsent - left < LEAST_TAKEN:
            self.cycle.scope["state"]["is_slow"] = True
            self.transport.abort()
        elif left:
            self._start_write_timer()
