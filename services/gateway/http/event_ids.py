"""The `id:` of events, which a client sends back as `Last-Event-ID`: what it has received.

Per choice the number of output tokens that its text stands for, with `e` behind it once the choice's finish was told;
`u` at the very end once the usage was told: `17`, `17,15e`, `17e,15eu`. The number alone could not tell whether the
client has the text that comes only with the end. `0` stands for any number of choices: from the start.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequest

HEADER = "last-event-id"
MAX_LENGTH = 8192
_PATTERN = re.compile(r"[0-9]{1,10}e?(,[0-9]{1,10}e?)*u?", re.ASCII)


@dataclass(slots=True)
class Received:
    """What a client has: per choice tokens and whether it knows the finish, and whether it knows the usage."""

    counts: list[int]
    ended: list[bool]
    has_usage: bool = False

    @classmethod
    def nothing(cls, num_choices: int) -> "Received":
        return cls([0] * num_choices, [False] * num_choices)

    @property
    def is_nothing(self) -> bool:
        return not (any(self.counts) or any(self.ended) or self.has_usage)

    @property
    def event_id(self) -> bytes:
        """The form that goes over the wire."""
        parts = (b"%de" % n if ended else b"%d" % n for n, ended in zip(self.counts, self.ended, strict=True))
        return b",".join(parts) + (b"u" if self.has_usage else b"")


def parse_last_event_id(text: str | None, most_tokens: Sequence[int]) -> Received:
    """What the header says, of a response whose choices have at most so many tokens. Absent or `0`: nothing.

    Raises:
        InvalidRequest: it is no id of an event of this response.
    """
    num_choices = len(most_tokens)
    if text is None or text.strip() in ("", "0"):
        return Received.nothing(num_choices)
    text = text.strip()
    if len(text) > MAX_LENGTH or not _PATTERN.fullmatch(text):
        raise _refusal("counts as in `17` or `17,15e`")
    parts = text.removesuffix("u").split(",")
    counts = [int(part.removesuffix("e")) for part in parts]
    ended = [part.endswith("e") for part in parts]
    if len(parts) != num_choices:
        raise _refusal(f"this response has {num_choices} choices, not {len(parts)}")
    if any(count > most for count, most in zip(counts, most_tokens, strict=True)):
        raise _refusal("more tokens than this response can have")
    if text.endswith("u") and not all(ended):
        raise _refusal("the usage comes after all choices have ended")
    return Received(counts, ended, text.endswith("u"))


def _refusal(message: str) -> InvalidRequest:
    return InvalidRequest(f"Last-Event-ID: {message}", param="Last-Event-ID")
