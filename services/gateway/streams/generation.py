"""One HTTP request's sequences, from submission to their ends."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from services.gateway.metrics import Metrics
from services.gateway.output.answers import answers_of
from services.gateway.output.output_function import Delta, OutputFunction
from services.gateway.streams.channel import Ending, TokenChannel
from services.gateway.streams.intake import Intake
from services.gateway.streams.reader import StepLogReader
from services.gateway.streams.sequences import News, Progress, Prompt, RunningSequence
from services.gateway.text.tokenizer import TextTokenizer
from shared.errors import IdempotencyConflict, PagewireError, QueueFull
from shared.messages import FinishReason, Submission

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
class Engine:
    """What generations share."""

    reader: StepLogReader
    intake: Intake
    metrics: Metrics
    tokenizer: TextTokenizer
    text_pool: Executor
    """For text work that is too long for the event loop."""


@dataclass(slots=True)
class Generation:
    """`async with` submits every sequence and, at the end, aborts those that have not ended.

    `cause` names why, for the scheduler and the metric, if the block is left early without an exception that tells.
    """

    engine: Engine
    submissions: Sequence[Submission]
    """Prompt-major; those with the same `group` are the choices, or candidates, of one prompt."""
    started_at: float
    """`time.monotonic()` at which the request arrived."""
    cause: str = "cancelled"
    _prompts: list[Prompt] = field(default_factory=list)
    _sequences: dict[str, RunningSequence] = field(default_factory=dict)
    _news: dict[str, RunningSequence] = field(default_factory=dict)
    _complete: list[Prompt] = field(default_factory=list)
    """Withheld prompts whose sequences have all ended."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_submitted: bool = False
    _failure: GenerationFailed | None = None

    def __post_init__(self) -> None:
        groups: dict[str, Prompt] = {}
        for index, submission in enumerate(self.submissions):
            request_id, params = submission.request_id, submission.params
            prompt = groups.get(submission.group or request_id)
            if prompt is None:
                prompt = groups[submission.group or request_id] = Prompt(self.num_choices)
                self._prompts.append(prompt)
            wants_record = params.with_logprobs or params.beam_width > 0
            channel = TokenChannel(request_id, params.max_tokens, self._on_news, wants_record=wants_record)
            output = OutputFunction(self.engine.tokenizer, submission).start()
            sequence = RunningSequence(index, prompt, submission, channel, output)
            prompt.sequences.append(sequence)
            self._sequences[request_id] = sequence

    async def __aenter__(self) -> Self:
        try:
            await self._submit()
        except BaseException as error:
            if isinstance(error, PagewireError):
                self.cause = "refused"
            self._close()
            raise
        for prompt in self._prompts:
            self.engine.metrics.accepted(prompt.num_tokens, prompt.max_tokens, prompt.num_choices)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, GenerationFailed):
            self.cause = error.code
        self._close()

    async def _submit(self) -> None:
        # Tracked before they are submitted, so that not even a first token can be missed.
        for sequence in self._sequences.values():
            self.engine.reader.track(sequence.channel)
        self._is_submitted = True  # from here on they may be queued, whatever we hear
        try:
            await self.engine.intake.submit(self.submissions)
        except (QueueFull, IdempotencyConflict):
            self._is_submitted = False
            raise

    @property
    def num_choices(self) -> int:
        """Results that the client gets."""
        return sum(prompt.num_choices for prompt in self._prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, whatever the number of its choices."""
        return sum(prompt.num_tokens for prompt in self._prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed again, known with the first output token.

        Of each prompt's first choice: that the others share its prompt is no hit in what was cached before.
        """
        return sum(prompt.sequences[0].channel.num_cached_tokens for prompt in self._prompts)

    @property
    def num_output_tokens(self) -> int:
        """All that were generated and count, also those of candidates that are not returned."""
        return sum(sequence.num_tokens for sequence in self._sequences.values())

    @property
    def is_done(self) -> bool:
        return self._failure is None and not self._complete and all(s.is_done for s in self._sequences.values())

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
        progress = [p for sequence in news.values() if not sequence.is_done for p in self._advance(sequence)]
        while self._complete:
            progress += await self._reveal(self._complete[0])
            del self._complete[0]
        if not progress:
            self._raise_failure()
        return progress

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # ---------------------------------------------------------------- news

    def _on_news(self, channel: TokenChannel) -> None:
        self._news[channel.request_id] = self._sequences[channel.request_id]
        self._wake.set()

    def _advance(self, sequence: RunningSequence) -> list[Progress]:
        """Turn what waits in the channel into client output; empty if the client has nothing to see."""
        news = sequence.read()
        self._observe(sequence, news.delta.num_tokens)
        if sequence.prompt.is_withheld:
            self._gather(sequence, news)
            return []
        if news.reason is not None:
            if news.ending is None:
                self._stop(sequence, news.delta)
            self._finish(sequence, news.reason)
        elif news.ending is not None:
            self._fail(sequence, news.ending)
        if not news.text and news.reason is None and not news.has_tokens:
            return []
        return [Progress(sequence.index, news.text, sequence.num_tokens, news.reason, news.delta.stop_reason)]

    def _gather(self, sequence: RunningSequence, news: News) -> None:
        """Keep what a withheld sequence gained. Only its final record ends it."""
        ending = news.ending
        if ending is None:
            self._stop(sequence, news.delta)
        elif ending.code or news.reason is None or sequence.channel.record is None:
            self._fail(sequence, ending)
        else:
            self._finish(sequence, news.reason)
            if all(s.is_done for s in sequence.prompt.sequences):
                self._complete.append(sequence.prompt)

    async def _reveal(self, prompt: Prompt) -> list[Progress]:
        """The choices of a withheld prompt, whole."""
        loop, tokenizer = asyncio.get_running_loop(), self.engine.tokenizer
        answers = await loop.run_in_executor(self.engine.text_pool, answers_of, tokenizer, prompt.records)
        first = prompt.sequences[0]
        if first.is_beam_search:
            self._observe(first, sum(a.num_tokens for a in answers))
        return [
            Progress(prompt.first_choice + rank, a.text, a.num_tokens, a.finish_reason, a.stop_reason)
            for rank, a in enumerate(answers)
        ]

    def _observe(self, sequence: RunningSequence, num_tokens: int) -> None:
        new = num_tokens - sequence.num_tokens
        if new <= 0:
            return
        now = time.monotonic()
        metrics = self.engine.metrics
        if sequence.last_token_at is None:
            metrics.time_to_first_token.observe(now - self.started_at)
            sequence.first_token_at = now
        else:
            metrics.observe_tokens(new, now - sequence.last_token_at)
        metrics.generation_tokens.inc(new)
        sequence.last_token_at = now
        sequence.num_tokens = num_tokens

    def _stop(self, sequence: RunningSequence, delta: Delta) -> None:
        """Tell the scheduler of a stop string that completed before the end."""
        if delta.stop_at is not None and not sequence.is_stopped:
            sequence.is_stopped = True
            self.engine.intake.stop(sequence.submission.request_id, delta.stop_at)

    def _finish(self, sequence: RunningSequence, reason: str) -> None:
        sequence.is_done = True
        self.engine.reader.untrack(sequence.channel)
        self.engine.metrics.finished(reason)
        seconds = time.monotonic() - self.started_at
        self.engine.metrics.completed(sequence.num_tokens, seconds, sequence.decode_s)
        if sequence is sequence.prompt.sequences[0]:
            self.engine.metrics.cached_tokens.inc(sequence.channel.num_cached_tokens)

    def _fail(self, sequence: RunningSequence, ending: Ending) -> None:
        request_id = sequence.submission.request_id
        logger.error("request %s ended: %s %s", request_id, ending.code, ending.message)
        by_engine = ending.code == "generation_failed"  # its message is not for clients
        message = f"generation failed in request {request_id}" if by_engine else f"{ending.message} ({request_id})"
        self._failure = GenerationFailed(message, code=ending.code)
        if ending.code in _STATUS:
            sequence.is_done = True  # the scheduler ended it: nothing to abort
            self.engine.reader.untrack(sequence.channel)
        self.engine.metrics.finished(str(FinishReason.ERROR))

    # ---------------------------------------------------------------- the end

    def _close(self) -> None:
        """Give up what has not ended. Does not wait, so that no cancellation can cut it short."""
        for sequence in self._sequences.values():
            self.engine.reader.untrack(sequence.channel)
        given_up = [s for s in self._sequences.values() if self._is_submitted and not s.is_done]
        for sequence in given_up:
            self.engine.intake.abort(sequence.submission.request_id, self.cause)
        if given_up:
            self.engine.metrics.aborted(self.cause)
