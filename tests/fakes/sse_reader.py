"""Reading a stream of server-sent events strictly."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SseEvent:
    """One event: `data` is decoded JSON, or the string `[DONE]`."""

    data: Any
    event_id: str | None


@dataclass
class SseStream:
    """Everything that a body held."""

    events: list[SseEvent] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    @property
    def chunks(self) -> list[Any]:
        """All events but `[DONE]`."""
        return [e.data for e in self.events if e.data != "[DONE]"]

    @property
    def is_done(self) -> bool:
        """Whether the last event is the one `[DONE]`."""
        return [e.data for e in self.events].count("[DONE]") == 1 and self.events[-1].data == "[DONE]"

    def text(self, choice: int = 0) -> str:
        """The concatenated text of one choice."""
        parts = [c for chunk in self.chunks for c in chunk.get("choices", ()) if c["index"] == choice]
        return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in parts)

    def finish_reasons(self, choice: int = 0) -> list[str]:
        """All finish reasons of one choice: one, if all is well."""
        parts = [c for chunk in self.chunks for c in chunk.get("choices", ()) if c["index"] == choice]
        return [c["finish_reason"] for c in parts if c["finish_reason"] is not None]


def parse_sse(lines: Iterable[str]) -> SseStream:
    """Parse; anything that is no event stream fails."""
    stream, data, event_id = SseStream(), None, None
    for line in lines:
        if line.startswith(":"):
            stream.comments.append(line[1:].strip())
        elif line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            assert data is None, "one data line per event"
            data = line[6:]
        elif line == "":
            if data is not None:
                stream.events.append(SseEvent(data if data == "[DONE]" else json.loads(data), event_id))
            data, event_id = None, None
        else:
            raise AssertionError(f"not a line of an event stream: {line!r}")
    return stream
