"""What the gateway writes: submissions, and the stops and aborts that follow them."""

import asyncio
import logging
from collections.abc import Sequence

import redis.asyncio

from shared.errors import IdempotencyConflict, Unavailable
from shared.keys import Keys
from shared.messages import FIELD, Abort, Stop, Submission, encode
from shared.redis_client import RedisFailure
from shared.scripts import submit

SUBMIT_TRIES = 3
RETRY_S = 0.1
BATCH = 256

logger = logging.getLogger(__name__)


class Intake:
    """Submits at once; sends stops and aborts in the background, in order, until Redis has taken them."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, record_ttl_s: int) -> None:
        self._client = client
        self._keys = keys
        self._ttl_s = record_ttl_s
        self._outbox: asyncio.Queue[Stop | Abort] = asyncio.Queue()

    async def submit(self, submissions: Sequence[Submission]) -> None:
        """Queue all or none. A lost reply is made up for by a second try, which the script recognises.

        Raises:
            QueueFull: a queue cap is reached. Nothing was queued.
            IdempotencyConflict: an id is taken. Nothing was queued.
            Unavailable: Redis does not answer. The requests may have been queued: abort them.
        """
        for attempt in range(1, SUBMIT_TRIES + 1):
            try:
                answer = await submit(self._client, self._keys, *submissions, ttl_s=self._ttl_s)
            except RedisFailure as error:
                logger.warning("submit, try %d: %s", attempt, type(error).__name__)
                await asyncio.sleep(RETRY_S * attempt)
                continue
            if not answer.accepted:
                raise IdempotencyConflict(f"the request id {answer.request_id} is taken")
            return
        raise Unavailable("the message log is unreachable", reason="redis_unreachable")

    def stop(self, request_id: str, num_output_tokens: int) -> None:
        """A stop string completed: only so many tokens count."""
        self._outbox.put_nowait(Stop(request_id=request_id, num_output_tokens=num_output_tokens))

    def abort(self, request_id: str, cause: str) -> None:
        """Nobody waits for the request any more."""
        self._outbox.put_nowait(Abort(request_id=request_id, cause=cause))

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

    async def _send(self, batch: list[Stop | Abort]) -> None:
        """Append the batch; after a failure it is repeated as a whole, which the scheduler does not mind."""
        while True:
            try:
                async with self._client.pipeline(transaction=False) as pipe:
                    for message in batch:
                        pipe.xadd(self._keys.intake, {FIELD: encode(message)})
                    await pipe.execute()
                return
            except RedisFailure as error:
                logger.warning("intake: %s; %d messages wait", type(error).__name__, len(batch))
                await asyncio.sleep(RETRY_S * 5)
