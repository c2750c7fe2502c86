"""E: what a client sees, as a pure function of (record, committed tokens).

Every gateway applies it, to a live stream, to a stream that it takes over and to a finished record. The tokens may be
cut into events anywhere: each token is processed alone, so the concatenated text depends on the tokens only.

    tokens ─► Detokenizer ─► StopScanner ─► text
              holds bytes     holds a possible beginning
              of characters   of a stop string

* Special tokens, and the EOS or stop token that ends the request, have no text.
* A stop string counts as completed by the token at which its last character became final, if at least `min_tokens`
  tokens precede or are it. It is not shown. Tokens after it are neither shown nor counted, and it wins over an ending
  that comes later (`length`).
* Text that depends on the end (what was held) comes with the delta that carries the finish.
* A completion continues its prompt: a leading space of the first output token is kept, so that prompt + text is the
  text of prompt + output. A chat answer is a text of its own: equal to `decode(output)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.output.stop_strings import StopStrings
from services.gateway.text.tokenizer import TextTokenizer
from shared.messages import FINISH_REASONS, EndReason, FinishReason, Submission
from shared.packing import unpack_int32


@dataclass(frozen=True, slots=True)
class Delta:
    """What one feed adds to a client's output, and where the stream stands after it."""

    text: str
    num_tokens: int
    """Committed output tokens that the stream has consumed, from the start: the SSE `id` and `completion_tokens`."""
    finish_reason: FinishReason | None = None
    """Set from the delta that ends the stream on."""
    stop_reason: str | int | None = None
    """The stop string or the stop token that ended it; None for EOS and length."""
    stop_at: int | None = None
    """If a stop string ended it: the number of output tokens that count. The scheduler must hear of it (`Stop`)."""


class OutputFunction:
    """E for one submission. Immutable; may be shared by all streams of the request."""

    def __init__(self, tokenizer: TextTokenizer, submission: Submission) -> None:
        self.tokenizer = tokenizer
        self.params = submission.params
        self.stops = StopStrings(submission.stop)
        prompt = unpack_int32(submission.prompt_tokens)
        special = tokenizer.special_token_ids
        self.continues = submission.kind == "completion" and any(token not in special for token in reversed(prompt))

    def start(self) -> "OutputStream":
        """The stream of a client that has received nothing yet."""
        return OutputStream(self)

    def resume_from(
        self, num_received: int, tokens: Sequence[int], end_reason: EndReason | None = None
    ) -> tuple["OutputStream", Delta]:
        """E(tokens) − E(first `num_received` tokens): the stream to go on with, and what its client still needs.

        The client is taken to have received every delta up to count `num_received`, but not the finish.
        """
        stream = self.start()
        stream.feed(tokens[:num_received])
        return stream, stream.feed(tokens[num_received:], end_reason)

    def whole(self, tokens: Sequence[int], end_reason: EndReason | None = None) -> Delta:
        """E(tokens) in one piece, for a client that does not stream."""
        return self.start().feed(tokens, end_reason)

    def is_ending(self, token: int, index: int) -> bool:
        """Whether `token` at output index `index` is one that ends the request, and so has no text."""
        params = self.params
        if index < params.min_tokens:
            return False
        is_eos = not params.ignore_eos and token in self.tokenizer.eos_token_ids
        return is_eos or token in params.stop_token_ids


class OutputStream:
    """E, fed incrementally. One client's stream over one request; not for use by several threads at once."""

    def __init__(self, function: OutputFunction) -> None:
        self._function = function
        self._detokenizer = function.tokenizer.start_detokenizer(continues=function.continues)
        self._scanner = function.stops.start()
        self._last_token: int | None = None
        self.num_tokens = 0
        """Committed output tokens consumed so far."""
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._stop_at: int | None = None

    @property
    def is_finished(self) -> bool:
        return self._finish_reason is not None

    def feed(self, tokens: Sequence[int], end_reason: EndReason | None = None) -> Delta:
        """Add the next committed tokens, and the end if the last of them ended the request at a worker.

        After the finish, tokens are ignored and the finish is repeated with an empty text.
        """
        text = ""
        last = len(tokens) - 1 if end_reason in (EndReason.EOS, EndReason.STOP_TOKEN) else -1
        for position, token in enumerate(tokens):
            if self._finish_reason is not None:
                break
            text += self._step(token, hidden=position == last)
        if end_reason is not None and self._finish_reason is None:
            text += self._finish(EndReason(end_reason))
        return self._delta(text)

    def close(self) -> Delta:
        """The text that was held, for a request that ended otherwise (aborted, too late): no finish reason."""
        return self._delta("" if self.is_finished else self._show(self._detokenizer.flush()) + self._scanner.flush())

    def _delta(self, text: str) -> Delta:
        return Delta(text, self.num_tokens, self._finish_reason, self._stop_reason, self._stop_at)

    def _step(self, token: int, hidden: bool) -> str:
        index, self._last_token = self.num_tokens, token
        self.num_tokens = index + 1
        if hidden or self._function.is_ending(token, index):
            return ""
        return self._show(self._detokenizer.push(token))

    def _show(self, text: str) -> str:
        """Pass `text` through the stop strings; a completed one finishes the stream."""
        if not text or not self._function.stops.patterns:
            return text
        shown, stop = self._scanner.push(text, honoured=self.num_tokens >= self._function.params.min_tokens)
        if stop is not None:
            self._finish_reason, self._stop_reason, self._stop_at = FinishReason.STOP, stop, self.num_tokens
        return shown

    def _finish(self, end_reason: EndReason) -> str:
        text = self._show(self._detokenizer.flush())
        if self.is_finished:  # the held text completed a stop string
            return text
        self._finish_reason = FINISH_REASONS[end_reason]
        self._stop_reason = self._last_token if end_reason is EndReason.STOP_TOKEN else None
        return text + self._scanner.flush()
