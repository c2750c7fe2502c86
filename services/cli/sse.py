"""Server-sent events, as a client reads them."""

from collections.abc import Iterator
from dataclasses import dataclass

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    """One event; `data` of several lines is joined by newlines."""

    data: bytes
    id: bytes = b""
    event: bytes = b""


class SseParser:
    """Cuts a byte stream into events, however the network cut it into chunks."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """The events that `chunk` completes. Comments and unknown fields are skipped."""
        *blocks, self._rest = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            event = _parse_block(block)
            if event is not None:
                yield event


def _parse_block(block: bytes) -> Event | None:
    fields: dict[bytes, list[bytes]] = {}
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        fields.setdefault(name, []).append(value.removeprefix(b" "))
    if b"data" not in fields:
        return None
    return Event(b"\n".join(fields[b"data"]), fields.get(b"id", [b""])[-1], fields.get(b"event", [b""])[-1])
