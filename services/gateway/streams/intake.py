"""What the gateway writes: submissions, and what follows them: stops, and who answers for a response."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import redis.asyncio

from shared.errors import IdempotencyConflict, PagewireError, QueueFull, Unavailable
from shared.keys import Keys
from shared.messages import FIELD, Abort, ResponseHead, Stop, Submission, encode
from shared.redis_client import RedisFailure
from shared.scripts import attachments, submit
from shared.scripts.quotas import Quota, charge

SUBMIT_TRIES = 3
RETRY_S = 0.1
BATCH = 256
SETTLE_S = 1.0
SUBMITS_AT_ONCE = 8
"""Few: so the first refusal of a flood comes before the rest has been sent."""
FULL_S = 0.02
"""A full queue is taken to stay full for so long: a flood is refused without the work that its requests would cost."""

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
    """A caller has had so many output tokens."""

    quota: Quota
    num_tokens: int


Notice = Stop | Leave | End | Charge


class Intake:
    """Submits at once; sends notices in the background, in order, until Redis has taken them."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, record_ttl_s: int) -> None:
        self.client = client
        self.keys = keys
        self._ttl_s = record_ttl_s
        self._outbox: asyncio.Queue[Notice] = asyncio.Queue()
        self._slots = asyncio.Semaphore(SUBMITS_AT_ONCE)
        self._full_until = 0.0

    def check_room(self) -> None:
        """For a request that would be refused: before it is tokenized. Callable from any thread.

        Raises:
            QueueFull: the queue was full a moment ago.
        """
        if time.monotonic() < self._full_until:
            raise QueueFull("the queue is full (requests); try again later", whoever_asks=True)

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
        async with self._slots:
            if claim is None:
                self.check_room()
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
                    self.client,
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
            except QueueFull as error:
                if error.whoever_asks:
                    self._full_until = time.monotonic() + FULL_S
                raise
            except RedisFailure as error:
                logger.warning("submit, try %d: %s", attempt, type(error).__name__)
                await asyncio.sleep(RETRY_S * attempt)
                continue
            if answer.accepted:
                return
            if claim is not None:
                raise AlreadySubmitted(answer.request_id)
            raise IdempotencyConflict(f"the request id {answer.request_id} is taken")
        raise Unavailable("the message log is unreachable", reason="redis_unreachable")

    async def _settle(self) -> None:
        """What ended before counts no more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self.flush()

    def tell(self, notice: Notice) -> None:
        """Send a notice soon."""
        self._outbox.put_nowait(notice)

    async def flush(self) -> None:
        """Return once everything has been sent."""
        await self._outbox.join()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            batch = [await self._outbox.get()]
            while len(batch) < BATCH and not self._outbox.empty():
                batch.append(self._outbox.get_nowait())
            await self._send(batch)
            for _ in batch:
                self._outbox.task_done()

    async def _send(self, batch: list[Notice]) -> None:
        """Send the batch; after a failure it is repeated as a whole, which changes nothing a second time."""
        while True:
            try:
                async with self.client.pipeline(transaction=False) as pipe:
                    for notice in batch:
                        self._add(pipe, notice)
                    await pipe.execute()
                return
            except RedisFailure as error:
                logger.warning("intake: %s; %d messages wait", type(error).__name__, len(batch))
                await asyncio.sleep(RETRY_S * 5)

    def _add(self, pipe: redis.asyncio.client.Pipeline, notice: Notice) -> None:
        if isinstance(notice, Stop):
            pipe.xadd(self.keys.intake, {FIELD: encode(notice)})
        elif isinstance(notice, Charge):
            charge(pipe, self.keys, notice.quota, notice.num_tokens)
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
