"""What comes in: requests with their times, their texts and how long their outputs will be.

A text is a row of named pieces. A piece stands for tokens that are the same wherever its name is, so two prompts that
begin with the same pieces share their prefix, and the next turn of a conversation begins with the last one's output.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from shared.errors import ConfigError
from shared.messages import Submission
from shared.packing import pack_int32, unpack_int32
from shared.records import choice_id
from shared.sampling import SamplingParams

MODEL = "simulated"


class Piece(NamedTuple):
    """`length` tokens that `name` stands for."""

    name: str
    length: int


Text = bytes | tuple[Piece, ...]
"""Packed int32 token ids, or pieces."""


def num_tokens(text: Text) -> int:
    return len(text) // 4 if isinstance(text, bytes) else sum(piece.length for piece in text)


def tokens_of(text: Text) -> bytes:
    """The token ids of a text, packed."""
    return text if isinstance(text, bytes) else b"".join(pack_int32(_tokens(piece)) for piece in text)


def _tokens(piece: Piece) -> "array[int]":
    base = int.from_bytes(blake2b(piece.name.encode(), digest_size=4).digest(), "little") >> 2
    return array("i", range(base, base + piece.length))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    request_id: str
    arrival: float
    """Seconds from the start; with `after`: from the end of that request (the user reads and types)."""
    prompt: Text
    output: Text
    """What it would say. It ends by EOS there, or by length if `max_tokens` is no more."""
    max_tokens: int = 0
    """What the client allows; 0: exactly as much as the output has."""
    after: str = ""
    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""
    num_choices: int = 1
    """Choices that share the prompt (`n`); each becomes a request of its own."""
    group: str = ""
    """For one of several choices that are requests of their own already: the id of the first."""
    abort_at: float = 0.0
    """Seconds after its submission at which the client leaves; 0: it stays."""

    def choices(self) -> list["TraceRequest"]:
        """One request per choice, each with an output of its own."""
        if self.num_choices == 1:
            return [self]
        parts = [(choice_id(self.request_id, number), number) for number in range(self.num_choices)]
        return [replace(self, request_id=part, output=self._output_of(number)) for part, number in parts]

    def _output_of(self, choice: int) -> Text:
        if isinstance(self.output, bytes) or choice == 0:
            return self.output
        return tuple(Piece(f"{piece.name}#{choice}", piece.length) for piece in self.output)

    def submissions(self) -> list[tuple[Submission, "array[int]"]]:
        """The records as a gateway would write them, with the tokens that a worker will find."""
        prompt, choices = tokens_of(self.prompt), self.choices()
        group = self.request_id if len(choices) > 1 else self.group
        return [
            (self._submission(choice, prompt, number, group), unpack_int32(tokens_of(choice.output)))
            for number, choice in enumerate(choices)
        ]

    def _submission(self, choice: "TraceRequest", prompt: bytes, number: int, group: str) -> Submission:
        return Submission(
            request_id=choice.request_id,
            model=MODEL,
            kind="completion",
            created=0.0,
            prompt_tokens=prompt,
            params=SamplingParams(max_tokens=self.limit, seed=0, choice=number),
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            group=group,
        )

    @property
    def limit(self) -> int:
        """`max_tokens` as the scheduler sees it."""
        return self.max_tokens or num_tokens(self.output)

    @property
    def max_total_tokens(self) -> int:
        return num_tokens(self.prompt) + self.limit


Trace = Sequence[TraceRequest]
MAX_TOKENS = 2**24
"""Of one request, prompt and output: they are written out while it lives."""


def check_trace(trace: Trace) -> None:
    """Raises ConfigError, with the request's id, for what no scheduler could be asked."""
    known: set[str] = set()
    for request in trace:
        flaw = _flaw(request, known)
        if flaw:
            raise ConfigError(f"request {request.request_id!r} of the trace: {flaw}")
        known.add(request.request_id)


def _flaw(request: TraceRequest, known: set[str]) -> str:
    """What is wrong with a request behind those that are `known`."""
    flaws = (
        ("its id is there twice", request.request_id in known),
        ("it has no prompt", not num_tokens(request.prompt)),
        ("it has no output", not num_tokens(request.output)),
        (f"it has more than {MAX_TOKENS} tokens", request.max_total_tokens > MAX_TOKENS),
        ("its output is longer than max_tokens", num_tokens(request.output) > request.limit),
        ("its arrival is no time", not 0 <= request.arrival < float("inf")),
        (
            f"it comes after {request.after!r}, which is not before it",
            bool(request.after) and request.after not in known,
        ),
        ("it has no choices", request.num_choices < 1),
    )
    return next((text for text, holds in flaws if holds), "")
