"""No stream hangs for ever: requests without news are compared with their records, and with what the pool says. Of whom
nothing has come at all, the scheduler is told once more.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import redis.asyncio

from services.gateway.streams.channel import Ending, TokenChannel
from services.gateway.streams.live_requests import LiveRequests, now
from shared.keys import Keys
from shared.messages import FIELD, Submit, encode

QUIET_S = 5.0
"""A request without news for this long is compared with its record."""
SUBMITTED_AGAIN = 6
"""At this look in a row, if nothing has come of it by then: its entry in intake may have been lost."""

logger = logging.getLogger(__name__)


class QuietRequests:
    """Resumes those whose record knows more, ends them all if their pool is gone."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        live: LiveRequests,
        pool_outage_s: Callable[[], float],
        outage_limit_s: float,
        quiet_s: float,
    ) -> None:
        self._client = client
        self._keys = keys
        self._live = live
        self._pool_outage_s = pool_outage_s
        self._outage_limit_s = outage_limit_s
        self.quiet_s = quiet_s

    async def look(self) -> None:
        """Once.

        Raises:
            RedisFailure: Redis did not answer.
        """
        quiet = [c for c in self._live.channels if c.ending is None and now() - c.last_news > self.quiet_s]
        if not quiet:
            return
        if self._pool_outage_s() > self._outage_limit_s:
            for channel in quiet:
                channel.end(Ending.failure("pool_unavailable", "no scheduler or worker has been alive for too long"))
            return
        sizes = await self._sizes(quiet)
        silent = [c for c, (submission, *more) in zip(quiet, sizes, strict=True) if submission and not any(more)]
        await self._submit_again([c for c in silent if not c.committed and c.num_quiet + 1 == SUBMITTED_AGAIN])
        for channel, (submission, final, output) in zip(quiet, sizes, strict=True):
            channel.last_news = now()
            channel.num_quiet += 1
            if not submission or final or output // 4 > channel.committed:
                self._live.rebuild_due = True

    async def _submit_again(self, channels: Sequence[TokenChannel]) -> None:
        """The leader passes over whom it knows."""
        if not channels:
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for channel in channels:
                logger.info("request %s: no token yet, submitted again", channel.request_id)
                pipe.xadd(self._keys.intake, {FIELD: encode(Submit(request_id=channel.request_id))})
            await pipe.execute()

    async def _sizes(self, channels: Sequence[TokenChannel]) -> list[tuple[int, int, int]]:
        """Bytes of submission, end and output in each record."""
        async with self._client.pipeline(transaction=False) as pipe:
            for channel in channels:
                for field in ("submission", "final", "output"):
                    pipe.hstrlen(self._keys.request(channel.request_id), field)
            sizes: Any = await pipe.execute()
        return list(zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True))
