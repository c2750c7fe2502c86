"""The sequences behind one HTTP request: what they gain, and to which choices they belong."""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from services.gateway.output.output_function import Delta, OutputStream
from services.gateway.streams.channel import Ending, TokenChannel
from shared.messages import EndReason, FinishReason, Submission
from shared.records import RequestRecord

READ_AT_ONCE = 256
"""Tokens: about 1 ms of work, so that a long answer that is taken over keeps nobody else waiting."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one choice gained. `num_tokens` counts from its start; reasons are set in the last progress of a choice."""

    choice: int
    text: str
    num_tokens: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class News(NamedTuple):
    """What a sequence gained, as client output. `reason`: it ended, and how; None also if it failed."""

    text: str
    delta: Delta
    has_tokens: bool
    ending: Ending | None
    reason: str | None


@dataclass(slots=True)
class Prompt:
    """The sequences of one prompt, and the choices that they become."""

    first_choice: int
    sequences: "list[RunningSequence]" = field(default_factory=list)

    @property
    def is_withheld(self) -> bool:
        """Whether the client sees nothing before all have ended: `best_of`, beam search."""
        params = self.sequences[0].submission.params
        return params.with_logprobs or params.beam_width > 0

    @property
    def num_choices(self) -> int:
        return self.sequences[0].submission.params.num_hypotheses if self.is_withheld else len(self.sequences)

    @property
    def max_tokens(self) -> int:
        return self.sequences[0].submission.params.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.sequences[0].submission.prompt_tokens) // 4

    @property
    def records(self) -> list[RequestRecord]:
        """The final ones, as far as they are known."""
        return [s.channel.record for s in self.sequences if s.channel.record is not None]


@dataclass(slots=True)
class RunningSequence:
    """One request in the pool. `index` is its place among all of them, and its choice if it is shown."""

    index: int
    prompt: Prompt
    submission: Submission
    channel: TokenChannel
    output: OutputStream
    num_received: int = 0
    """Tokens whose text the client has from another stream over the same request."""
    num_tokens: int = 0
    first_token_at: float | None = None
    """`time.monotonic()`; so is the next."""
    last_token_at: float | None = None
    is_stopped: bool = False
    is_done: bool = False

    @property
    def decode_s(self) -> float:
        """From its first token to its last one."""
        return (self.last_token_at or 0.0) - (self.first_token_at or 0.0)

    @property
    def is_beam_search(self) -> bool:
        return self.submission.params.beam_width > 0

    @property
    def has_been_told_too_much(self) -> bool:
        """Whether the client claims tokens that never were. Of a request that was ended from outside some may have been
        told that its record does not hold: they came while its end was on its way."""
        ending = self.channel.ending
        is_natural = ending is not None and ending.reason in (FinishReason.STOP, FinishReason.LENGTH)
        return is_natural and self.channel.committed < self.num_received

    def read(self) -> News:
        """Take what waits in the channel, or a good part of it, and turn it into client output."""
        tokens, ending = self.channel.take(READ_AT_ONCE)
        if self.is_beam_search:
            tokens = array("i")  # of its best result only: all results are read from the record
        failed = ending is not None and ending.code != ""
        told = None if failed or ending is None else ending.end_reason or _implied(ending)
        known = max(0, self.num_received - self.output.num_tokens)
        self.output.feed(tokens[:known])
        tokens = tokens[known:]
        delta = self.output.feed(tokens, told)
        text, reason = delta.text, delta.finish_reason
        if ending is not None and reason is None and not failed:  # who fails may go on elsewhere: what is held stays so
            text += self.output.close().text
            reason = ending.reason
        if self.num_received > self.output.num_tokens:
            text = ""  # ended from outside before tokens that the client has already
        return News(text, delta, len(tokens) > 0, ending, None if reason is None else str(reason))


def _implied(ending: Ending) -> EndReason | None:
    """The worker's ending behind a final record that does not name it."""
    return EndReason.LENGTH if ending.reason is FinishReason.LENGTH else None
