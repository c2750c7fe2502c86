"""What the gateway writes: submissions, and what follows them: stops, and who answers for a response."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import redis.asyncio

from services.gateway.streams.together import Together
from shared.errors import IdempotencyConflict, PagewireError, QueueFull, RateLimited, Unavailable
from shared.fault_points import FaultPoint, pass_point
from shared.keys import Keys
from shared.messages import FIELD, Abort, ResponseHead, Stop, Submission, encode
from shared.redis_client import RedisFailure
from shared.scripts import attachments, submit
from shared.scripts.quotas import Quota, charge, forget_ended

SUBMIT_TRIES = 3
RETRY_S = 0.1
BATCH = 256
SETTLE_S = 1.0
SUBMITS_AT_ONCE = 16
"""Few: so the first refusal of a flood comes before the rest has been sent."""
FORGET_S = 1.0
"""Between two looks for responses of one caller that only seem to live."""
GIVE_UP_S = 60.0
"""A notice that Redis answers with an error is tried again for so long."""
FULL_S = 0.02
"""A full queue is taken to stay full for so long: a flood is refused without the work that its requests would cost."""
LATELY_S = 0.1
"""After an answer that the queue is full, one request at a time asks again, for so long."""

logger = logging.getLogger(__name__)


class AlreadySubmitted(PagewireError):
    """The idempotency key stands for a request with the same body: `response_id`. Nothing was queued."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"this request is {response_id}")
        self.response_id = response_id


@dataclass(frozen=True, slots=True)
class Claim:
    """An idempotency key, and the body that it stands for; both as digests. Keys are scoped by tenant."""

    key_digest: str
    body_digest: str


@dataclass(frozen=True, slots=True)
class Leave:
    """A response's client left the attachment `number` (None: any): after `window_s` without another, or at once if
    that is 0, the requests in `aborts` are aborted."""

    response_id: str
    number: int | None
    window_s: float
    aborts: tuple[Abort, ...]


@dataclass(frozen=True, slots=True)
class End:
    """A response is complete: nobody needs to answer for it any more."""

    response_id: str


@dataclass(frozen=True, slots=True)
class Charge:
    """A response had so many output tokens, which its caller has had."""

    response_id: str
    quota: Quota
    num_tokens: int


Notice = Stop | Leave | End | Charge


@dataclass(frozen=True, slots=True)
class _Letter:
    """A notice that is to be sent, and since when (monotonic time)."""

    notice: Notice
    written_at: float = field(default_factory=time.monotonic)


class Intake:
    """Submits at once; sends notices in the background, in order, until Redis has taken them."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, record_ttl_s: int) -> None:
        self.client = client
        self._scripts = Together(client)
        self.keys = keys
        self._ttl_s = record_ttl_s
        self._outbox: asyncio.Queue[Notice] = asyncio.Queue()
        self._slots = asyncio.Semaphore(SUBMITS_AT_ONCE)
        self._told_full_at = self._full_until = self._away_at = float("-inf")
        self._forgot_at: dict[str, float] = {}
        self.num_given_up = 0
        """Notices that Redis would not take."""

    def check_room(self) -> None:
        """For a request that would be refused: before any work.

        Raises:
            QueueFull: the queue was full a moment ago.
        """
        if time.monotonic() < self._full_until:
            raise QueueFull("the queue is full (requests); try again later", whoever_asks=True)

    def take_turn(self) -> None:
        """As `check_room`, for one that goes on to be submitted: if the queue was full lately, it is the one that asks.

        Raises:
            QueueFull: the queue was full a moment ago, or another request asks.
        """
        self.check_room()
        now = time.monotonic()
        if now < self._told_full_at + LATELY_S:
            self._full_until = now + FULL_S

    async def submit(
        self,
        submissions: Sequence[Submission],
        head: ResponseHead,
        *,
        window_s: float,
        log_id: str,
        claim: Claim | None = None,
        quota: Quota | None = None,
    ) -> None:
        """Queue all or none. A lost reply is made up for by a second try, which the script recognises.

        Raises:
            QueueFull: a queue cap is reached, or the caller's quota. Nothing was queued.
            IdempotencyConflict: an id is taken, or the key has another body. Nothing was queued.
            AlreadySubmitted: the key stands for this very body. Nothing was queued.
            Unavailable: Redis does not answer. The requests may have been queued: abort them.
        """
        if quota is not None:
            await self._settle()
        came_at = time.monotonic()
        async with self._slots:
            if came_at < self._away_at:  # it waited behind one that Redis did not answer
                raise _unreachable()
            try:
                await self._submit(submissions, head, window_s, log_id, claim, quota)
            except RateLimited:
                if quota is None or not await self._forget_ended(quota):
                    raise
                await self._submit(submissions, head, window_s, log_id, claim, quota)

    async def _submit(
        self,
        submissions: Sequence[Submission],
        head: ResponseHead,
        window_s: float,
        log_id: str,
        claim: Claim | None,
        quota: Quota | None,
    ) -> None:
        for attempt in range(1, SUBMIT_TRIES + 1):
            try:
                answer = await submit(
                    self._scripts,
                    self.keys,
                    *submissions,
                    ttl_s=self._ttl_s,
                    idempotency_digest=claim.key_digest if claim else "",
                    body_digest=claim.body_digest if claim else "",
                    head=head,
                    window_s=window_s,
                    log_id=log_id,
                    quota=quota,
                )
                pass_point(FaultPoint.REQUEST_SUBMITTED)
            except QueueFull as error:
                if error.whoever_asks:
                    self._told_full_at = time.monotonic()
                    self._full_until = self._told_full_at + FULL_S
                raise
            except RedisFailure as error:
                logger.warning("submit, try %d: %s", attempt, type(error).__name__)
                await asyncio.sleep(RETRY_S * attempt)
                continue
            if answer.accepted:
                self._told_full_at = self._full_until = self._away_at = float("-inf")
                return
            if claim is not None:
                raise AlreadySubmitted(answer.request_id)
            raise IdempotencyConflict(f"the request id {answer.request_id} is taken")
        self._away_at = time.monotonic()
        raise _unreachable()

    async def _settle(self) -> None:
        """What ended before counts no more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self.flush()

    async def _forget_ended(self, quota: Quota) -> bool:
        """Whether responses counted that have ended: those of a gateway that died. Not looked for at every refusal."""
        now = time.monotonic()
        if now - self._forgot_at.get(quota.name, -FORGET_S) < FORGET_S:
            return False
        self._forgot_at[quota.name] = now
        try:
            return await forget_ended(self.client, self.keys, quota)
        except RedisFailure:
            return False

    def tell(self, notice: Notice) -> None:
        """Send a notice soon."""
        if not isinstance(notice, Charge) or notice.quota.tokens_per_s * notice.num_tokens > 0:
            self._outbox.put_nowait(notice)

    async def flush(self) -> None:
        """Return once everything has been sent."""
        await self._outbox.join()

    async def run(self) -> None:
        """Send until cancelled. What Redis refuses, because it is full, is tried again and stops nothing else."""
        refused: list[_Letter] = []
        while True:
            fresh = [] if refused else [_Letter(await self._outbox.get())]
            while len(fresh) < BATCH and not self._outbox.empty():
                fresh.append(_Letter(self._outbox.get_nowait()))
            letters = refused + fresh
            refused = await self._send(letters)
            for _ in range(len(letters) - len(refused)):
                self._outbox.task_done()
            if refused:
                await asyncio.sleep(RETRY_S * 5)

    async def _send(self, letters: Sequence[_Letter]) -> list[_Letter]:
        """Send all; those that Redis refused and that are to be tried again. Without an answer everything is sent once
        more, which changes nothing a second time."""
        while True:
            try:
                async with self.client.pipeline(transaction=False) as pipe:
                    for letter in letters:
                        self._add(pipe, letter.notice)
                    answers = await pipe.execute(raise_on_error=False)
                return [
                    letter
                    for letter, answer in zip(letters, answers, strict=True)
                    if isinstance(answer, Exception) and self._is_to_be_repeated(letter, answer)
                ]
            except RedisFailure as error:
                logger.warning("intake: %s; %d messages wait", type(error).__name__, len(letters))
                await asyncio.sleep(RETRY_S * 5)

    def _is_to_be_repeated(self, letter: _Letter, error: Exception) -> bool:
        """For a while: then the response's window, which nobody pushes ahead, ends it without this."""
        if time.monotonic() - letter.written_at <= GIVE_UP_S:
            logger.warning("intake: %s refused: %s", type(letter.notice).__name__, type(error).__name__)
            return True
        self.num_given_up += 1
        logger.error("intake: %s given up: %s", type(letter.notice).__name__, type(error).__name__)
        return False

    def _add(self, pipe: redis.asyncio.client.Pipeline, notice: Notice) -> None:
        if isinstance(notice, Stop):
            pipe.xadd(self.keys.intake, {FIELD: encode(notice)})
        elif isinstance(notice, Charge):
            charge(pipe, self.keys, notice.response_id, notice.quota, notice.num_tokens)
        elif isinstance(notice, End):
            pipe.zrem(self.keys.windows, notice.response_id)
        else:
            attachments.leave(
                pipe,
                self.keys,
                notice.response_id,
                number=notice.number,
                window_s=notice.window_s,
                aborts=notice.aborts,
            )


def _unreachable() -> Unavailable:
    return Unavailable("the message log is unreachable", reason="redis_unreachable")
