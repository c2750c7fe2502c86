"""One HTTP request's sequences, from their submission, or from where another stream over them left off, to their ends.

    client here                  client left                     nobody
┌─ Custody pushes ─┐    ┌─ this gateway goes on alone ─┐    ┌─ the window runs out ─┐
submit/adopt ──────▶ leave ───────────────────────────▶ … ─▶ aborted by any gateway
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from services.gateway.output.answers import answers_of
from services.gateway.output.output_function import Delta, OutputFunction
from services.gateway.streams.channel import Ending, TokenChannel
from services.gateway.streams.custody import Attachment
from services.gateway.streams.engine import Engine
from services.gateway.streams.intake import AlreadySubmitted, Charge, Claim, End, Leave
from services.gateway.streams.sequences import READ_AT_ONCE, News, Progress, Prompt, RunningSequence
from shared.errors import IdempotencyConflict, InvalidRequest, NoSuchResponse, PagewireError, QueueFull, Unavailable
from shared.messages import Abort, FinishReason, ResponseHead, Stop, Submission
from shared.redis_client import RedisFailure
from shared.scripts.attachments import adopt
from shared.scripts.quotas import Quota

_STATUS = {"generation_failed": 500, "worker_died": 500, "rejected": 400, "deadline_exceeded": 504}
_CLIENT_ENDS = ("client_disconnect", "slow_client")
_GATEWAY_ENDS = (
    "cancelled",
    "shutting_down",
    "internal_error",
    "redis_unreachable",
    "pool_unavailable",
    "log_gap",
)
"""Causes that are no fault of the request: its client may go on with it at another gateway."""

logger = logging.getLogger(__name__)


class GenerationFailed(PagewireError):
    """A sequence ended in an error. `message` may be shown to the client."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = _STATUS.get(code, 503)


@dataclass(slots=True)
class Generation:
    """`async with` submits every sequence, or adopts those of an earlier request, and leaves them at the end: what has
    not ended then is aborted, or goes on for its window.

    `cause` names why, for the scheduler and the metric, if the block is left early without an exception that tells.
    """

    engine: Engine
    submissions: Sequence[Submission]
    """Prompt-major; those with the same `group` are the choices, or candidates, of one prompt."""
    head: ResponseHead
    attachment: Attachment
    started_at: float
    """`time.monotonic()` at which the request arrived."""
    claim: Claim | None = None
    quota: Quota | None = None
    """Of the caller, who is charged for what the response computed, and for its place if this one is resumed."""
    is_resumed: bool = False
    """Adopt what was submitted before, instead of submitting."""
    cause: str = "cancelled"
    _prompts: list[Prompt] = field(default_factory=list)
    _sequences: dict[str, RunningSequence] = field(default_factory=dict)
    _news: dict[str, RunningSequence] = field(default_factory=dict)
    _complete: list[Prompt] = field(default_factory=list)
    """Withheld prompts whose sequences have all ended."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _is_submitted: bool = False
    _has_place: bool = False
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
            await (self._adopt() if self.is_resumed else self._submit())
        except BaseException as error:
            if isinstance(error, PagewireError):
                self.cause = "refused"
            self._close()
            raise
        self.engine.custody.hold(self.attachment)
        if self.is_resumed:
            self.engine.metrics.resumed()
        else:
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
        window_s, log_id = self.attachment.held_s, next(iter(self._sequences.values())).channel.start_id
        try:
            await self.engine.intake.submit(
                self.submissions, self.head, window_s=window_s, log_id=log_id, claim=self.claim, quota=self.quota
            )
        except (QueueFull, IdempotencyConflict, AlreadySubmitted):
            self._is_submitted = False
            raise

    async def _adopt(self) -> None:
        intake, attachment = self.engine.intake, self.attachment
        self.engine.open_streams.enter(self.quota)
        self._has_place = True
        try:
            attachment.number = await adopt(
                intake.client, intake.keys, attachment.response_id, window_s=attachment.held_s
            )
            if not attachment.number:
                raise NoSuchResponse(attachment.response_id)
            self._is_submitted = True
            await self.engine.reader.adopt([s.channel for s in self._sequences.values()])
        except RedisFailure as error:
            raise Unavailable("the message log is unreachable", reason="redis_unreachable") from error
        for sequence in self._sequences.values():
            if sequence.has_been_told_too_much:
                raise InvalidRequest("Last-Event-ID: more tokens than this response has", param="Last-Event-ID")

    @property
    def most_tokens(self) -> list[int]:
        """Of each choice, the most tokens that it can have."""
        return [prompt.max_tokens for prompt in self._prompts for _ in range(prompt.num_choices)]

    def skip(self, counts: Sequence[int]) -> None:
        """The client has the text of so many tokens of each choice: not of a withheld one, which is told as a whole."""
        for sequence in self._sequences.values():
            if not sequence.prompt.is_withheld:
                sequence.num_received = counts[sequence.index]

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

    @property
    def is_behind(self) -> bool:
        """Whether steps come faster than they are handled."""
        return self.engine.reader.is_behind

    async def next(self, timeout_s: float | None = None) -> list[Progress]:
        """Wait for news; what accumulated, or a good part of it, and the rest the next time. At most one progress per
        choice. Empty after `timeout_s` without any.

        Raises:
            GenerationFailed: after everything that came before it was told.
        """
        self._raise_failure()
        if self._news:
            await asyncio.sleep(0)  # others first; nothing is taken yet, so nothing is lost if this is cancelled here
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return []
        self._wake.clear()
        progress = self._advance_some()
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

    def _advance_some(self) -> list[Progress]:
        """Of what accumulated, as much as the event loop can do without."""
        progress: list[Progress] = []
        num_read = 0
        while self._news and num_read < READ_AT_ONCE:
            sequence = self._news.pop(next(iter(self._news)))
            if sequence.is_done:
                continue
            before = sequence.channel.num_taken
            progress += self._advance(sequence)
            num_read += sequence.channel.num_taken - before
            if sequence.channel.has_waiting and not sequence.is_done:
                self._on_news(sequence.channel)
        if self._news:
            self._wake.set()
        return progress

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
        sequence.num_tokens = num_tokens
        if self.is_resumed:
            return  # the gateway that accepted it counts them
        now = time.monotonic()
        metrics = self.engine.metrics
        if sequence.last_token_at is None:
            metrics.time_to_first_token.observe(now - self.started_at)
            sequence.first_token_at = now
        else:
            metrics.observe_tokens(new, now - sequence.last_token_at)
        metrics.generation_tokens.inc(new)
        sequence.last_token_at = now

    def _stop(self, sequence: RunningSequence, delta: Delta) -> None:
        """Tell the scheduler of a stop string that completed before the end."""
        if delta.stop_at is not None and not sequence.is_stopped:
            sequence.is_stopped = True
            self.engine.intake.tell(Stop(sequence.submission.request_id, delta.stop_at))

    def _finish(self, sequence: RunningSequence, reason: str) -> None:
        sequence.is_done = True
        self.engine.reader.untrack(sequence.channel)
        if self.is_resumed:
            return
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
        if not self.is_resumed:
            self.engine.metrics.finished(str(FinishReason.ERROR))

    # ---------------------------------------------------------------- the end

    def _close(self) -> None:
        """Leave. Does not wait, so that no cancellation can cut it short."""
        engine, attachment = self.engine, self.attachment
        engine.custody.release(attachment)
        if self._has_place:
            engine.open_streams.leave(self.quota)
        given_up = [s for s in self._sequences.values() if not s.is_done] if self._is_submitted else []
        if not given_up:
            self._untrack()
            if self._is_submitted:
                engine.intake.tell(End(attachment.response_id))
            return
        window_s = self._window_after_leaving()
        aborts = [Abort(s.submission.request_id, self.cause, attachment.number) for s in given_up]
        engine.intake.tell(Leave(attachment.response_id, attachment.number, window_s, tuple(aborts)))
        if window_s and self.cause in _CLIENT_ENDS:
            engine.background.start(self._go_on_alone())
        else:
            self._untrack()
        (engine.metrics.detached if window_s else engine.metrics.aborted)(self.cause)

    def _window_after_leaving(self) -> float:
        """How long it goes on; 0: not at all."""
        attachment = self.attachment
        is_left = attachment.is_resumable and self.cause in _CLIENT_ENDS
        # One that Redis did not confirm may be queued: who repeats it under its key shall find it, not an aborted one.
        not_taken = self.cause == "refused" and (self.is_resumed or attachment.is_resumable)
        goes_on = is_left or not_taken or self.cause in _GATEWAY_ENDS
        return attachment.window_s if goes_on else 0.0

    async def _go_on_alone(self) -> None:
        """Apply E while nobody reads, so that a stop string ends it; until it ends or its window is over."""
        try:
            async with asyncio.timeout(self.attachment.window_s):
                while not self.is_done:
                    await self.next()
            self.engine.intake.tell(End(self.attachment.response_id))
        except (TimeoutError, GenerationFailed):
            pass
        finally:
            self._untrack()

    def _untrack(self) -> None:
        for sequence in self._sequences.values():
            self.engine.reader.untrack(sequence.channel)
        # The one that it was resumed by pays as well, since its first gateway may be dead: the first bill counts.
        if self.quota is not None and (self.is_done or not self.is_resumed):
            self.engine.intake.tell(Charge(self.attachment.response_id, self.quota, self.num_output_tokens))
