"""No stream hangs for ever: requests without news are compared with their records, and with what the pool says."""

from collections.abc import Callable, Sequence
from typing import Any

import redis.asyncio

from services.gateway.streams.channel import Ending, TokenChannel
from services.gateway.streams.live_requests import LiveRequests, now
from shared.keys import Keys

QUIET_S = 5.0
"""A request without news for this long is compared with its record."""


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
        for channel, (submission, final, output) in zip(quiet, sizes, strict=True):
            channel.last_news = now()
            if not submission or final or output // 4 > channel.committed:
                self._live.rebuild_due = True

    async def _sizes(self, channels: Sequence[TokenChannel]) -> list[tuple[int, int, int]]:
        """Bytes of submission, end and output in each record."""
        async with self._client.pipeline(transaction=False) as pipe:
            for channel in channels:
                for field in ("submission", "final", "output"):
                    pipe.hstrlen(self._keys.request(channel.request_id), field)
            sizes: Any = await pipe.execute()
        return list(zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True))
