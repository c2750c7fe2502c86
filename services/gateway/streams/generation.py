"""One HTTP request's sequences, from submission to their ends."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from services.gateway.metrics import Metrics
from services.gateway.output.output_function import Delta, OutputFunction, OutputStream
from services.gateway.streams.channel import Ending, TokenChannel
from services.gateway.streams.intake import Intake
from services.gateway.streams.reader import StepLogReader
from services.gateway.text.tokenizer import TextTokenizer
from shared.errors import PagewireError, QueueFull
from shared.messages import EndReason, FinishReason, Submission

_STATUS = {"generation_failed": 500, "rejected": 400}

logger = logging.getLogger(__name__)


class GenerationFailed(PagewireError):
    """A sequence ended in an error. `message` may be shown to the client."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = _STATUS.get(code, 503)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one choice gained. `num_tokens` counts from its start; reasons are set in the last progress of a choice."""

    choice: int
    text: str
    num_tokens: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class _Choice:
    index: int
    submission: Submission
    channel: TokenChannel
    output: OutputStream
    num_tokens: int = 0
    last_token_at: float | None = None
    is_submitted: bool = False
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """What generations share."""

    reader: StepLogReader
    intake: Intake
    metrics: Metrics
    tokenizer: TextTokenizer


@dataclass(slots=True)
class Generation:
    """`async with` submits every sequence and, at the end, aborts those that have not ended.

    `cause` names why, for the scheduler and the metric, if the block is left early without an exception that tells.
    """

    engine: Engine
    submissions: Sequence[Submission]
    started_at: float
    """`time.monotonic()` at which the request arrived."""
    cause: str = "cancelled"
    _choices: list[_Choice] = field(default_factory=list)
    _by_id: dict[str, _Choice] = field(default_factory=dict)
    _news: dict[int, _Choice] = field(default_factory=dict)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: GenerationFailed | None = None

    def __post_init__(self) -> None:
        for index, submission in enumerate(self.submissions):
            channel = TokenChannel(submission.request_id, submission.params.max_tokens, self._on_news)
            output = OutputFunction(self.engine.tokenizer, submission).start()
            choice = _Choice(index, submission, channel, output)
            self._choices.append(choice)
            self._by_id[submission.request_id] = choice

    async def __aenter__(self) -> Self:
        try:
            for choice in self._choices:
                await self._submit(choice)
        except BaseException as error:
            if isinstance(error, PagewireError):
                self.cause = "refused"
            self._close()
            raise
        self.engine.metrics.prompt_tokens.inc(self.num_prompt_tokens)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, GenerationFailed):
            self.cause = error.code
        self._close()

    async def _submit(self, choice: _Choice) -> None:
        # Tracked before it is submitted, so that not even its first token can be missed.
        self.engine.reader.track(choice.channel)
        choice.is_submitted = True  # from here on it may be queued, whatever we hear
        try:
            await self.engine.intake.submit(choice.submission)
        except QueueFull:
            choice.is_submitted = False
            raise

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(s.prompt_tokens) for s in self.submissions) // 4

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed again. Known with the first output token."""
        return sum(choice.channel.num_cached_tokens for choice in self._choices)

    @property
    def num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def is_done(self) -> bool:
        return self._failure is None and all(choice.is_done for choice in self._choices)

    async def next(self, timeout_s: float | None = None) -> list[Progress]:
        """Wait for news; all that accumulated, at most one progress per choice. Empty after `timeout_s` without any.

        Raises:
            GenerationFailed: after everything that came before it was told.
        """
        self._raise_failure()
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return []
        self._wake.clear()
        news, self._news = self._news, {}
        progress = [p for choice in news.values() if not choice.is_done and (p := self._advance(choice)) is not None]
        if not progress:
            self._raise_failure()
        return progress

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---------------------------------------------------------------- news

    def _on_news(self, channel: TokenChannel) -> None:
        choice = self._by_id[channel.request_id]
        self._news[choice.index] = choice
        self._wake.set()

    def _advance(self, choice: _Choice) -> Progress | None:
        """Turn what waits in the channel into client output; None if the client has nothing to see."""
        tokens, ending = choice.channel.take()
        failed = ending is not None and ending.code != ""
        told = None if failed or ending is None else ending.end_reason or _implied(ending)
        delta = choice.output.feed(tokens, told)
        text, reason = delta.text, delta.finish_reason
        if ending is not None and reason is None:
            text += choice.output.close().text
            reason = None if failed else ending.reason
        self._observe(choice, delta)
        if reason is not None:
            self._finish(choice, delta, str(reason), ended=ending is not None)
        elif ending is not None:
            self._fail(choice, ending)
        if not text and reason is None and not tokens:
            return None
        told_reason = None if reason is None else str(reason)
        return Progress(choice.index, text, delta.num_tokens, told_reason, delta.stop_reason)

    def _observe(self, choice: _Choice, delta: Delta) -> None:
        new = delta.num_tokens - choice.num_tokens
        if new <= 0:
            return
        now = time.monotonic()
        metrics = self.engine.metrics
        if choice.last_token_at is None:
            metrics.time_to_first_token.observe(now - self.started_at)
        else:
            metrics.observe_tokens(new, now - choice.last_token_at)
        metrics.generation_tokens.inc(new)
        choice.last_token_at = now
        choice.num_tokens = delta.num_tokens

    def _finish(self, choice: _Choice, delta: Delta, reason: str, *, ended: bool) -> None:
        choice.is_done = True
        self.engine.reader.untrack(choice.channel)
        if delta.stop_at is not None and not ended:
            self.engine.intake.stop(choice.submission.request_id, delta.stop_at)
        self.engine.metrics.finished(reason)
        self.engine.metrics.e2e_request_latency.observe(time.monotonic() - self.started_at)

    def _fail(self, choice: _Choice, ending: Ending) -> None:
        request_id = choice.submission.request_id
        logger.error("request %s ended: %s %s", request_id, ending.code, ending.message)
        by_engine = ending.code == "generation_failed"  # its message is not for clients
        message = f"generation failed in request {request_id}" if by_engine else f"{ending.message} ({request_id})"
        self._failure = GenerationFailed(message, code=ending.code)
        if ending.code in _STATUS:
            choice.is_done = True  # the scheduler ended it: nothing to abort
            self.engine.reader.untrack(choice.channel)
        self.engine.metrics.finished(str(FinishReason.ERROR))

    # ---------------------------------------------------------------- the end

    def _close(self) -> None:
        """Give up what has not ended. Does not wait, so that no cancellation can cut it short."""
        for choice in self._choices:
            self.engine.reader.untrack(choice.channel)
        given_up = [choice for choice in self._choices if choice.is_submitted and not choice.is_done]
        for choice in given_up:
            self.engine.intake.abort(choice.submission.request_id, self.cause)
        if given_up:
            self.engine.metrics.aborted(self.cause)


def _implied(ending: Ending) -> EndReason | None:
    """The worker's ending behind a final record that does not name it."""
    return EndReason.LENGTH if ending.reason is FinishReason.LENGTH else None
