"""Server-sent events: one `data:` line of JSON each, behind an `id:` line that says what has been delivered."""

from typing import Any

import msgspec

PING = b": ping\n"
"""A comment: keeps proxies from cutting an idle stream.

No blank line follows: behind an `id:` line the official Python client takes one for the end of an event without data,
and fails to parse it.
"""
DONE = b"data: [DONE]\n\n"

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

MARK = "\0"
"""Stands for the text in what a `TextFrame` is made from."""

_encoder = msgspec.json.Encoder()


def event(data: dict[str, Any], identity: bytes | None = None) -> bytes:
    """One event."""
    payload = _encoder.encode(data)
    if identity is None:
        return b"data: %b\n\n" % payload
    return b"id: %b\ndata: %b\n\n" % (identity, payload)


class TextFrame:
    """Events of which only id and text differ: all else is serialised once."""

    def __init__(self, data: dict[str, Any]) -> None:
        """`data` is such an event with `MARK` for its text, the last variable thing in it."""
        self._before, _, self._after = _encoder.encode(data).rpartition(_encoder.encode(MARK))

    def event(self, text: str, identity: bytes) -> bytes:
        """The same bytes as `event` makes of the whole."""
        return b"id: %b\ndata: %b%b%b\n\n" % (identity, self._before, _encoder.encode(text), self._after)
