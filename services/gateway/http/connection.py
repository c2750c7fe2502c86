"""A connection that cannot be used to fill memory or to hold a place for ever: the head of a request is bounded."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of request line and headers."""
HEAD_S = 10.0
"""For sending them."""

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
    """Counts what comes before the body and how long it takes. Puts `abort_connection` into the request's state."""

    _head_bytes = 0
    _raw_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
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
        self.scope["state"]["abort_connection"] = self.transport.abort

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
