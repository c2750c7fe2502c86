"""The one reader of the step log in this process.

Every entry is decoded once; a `StepLogFollower` finds the rows of this gateway's own requests. The position moves on
only after an entry was applied, so a lost connection loses nothing. When steps are missing (a gap), every live request
is resumed from its record: the folded output first, then the log behind the record, read again. So is, for itself, a
request that another gateway followed before (`adopt`).

    log_source      entries, and whether they continue those that were read
    live_requests   channels, follower, position
    delivery        entry → channels
    adopting        requests that began elsewhere
    quiet           no stream hangs for ever
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from services.gateway.streams.adopting import Adoptions
from services.gateway.streams.catch_up import CatchUp, read_records, restore
from services.gateway.streams.channel import TokenChannel
from services.gateway.streams.delivery import Delivery
from services.gateway.streams.live_requests import LiveRequests, now
from services.gateway.streams.log_source import LogSource
from services.gateway.streams.quiet import QUIET_S, QuietRequests
from shared.keys import Keys
from shared.redis_client import RedisFailure, connect_async
from shared.streams import Entry, entry_order

BLOCK_S = 1.0
LOOK_S = 1.0
"""Between two looks at the log as a whole, and at requests without news."""
HOLE_RETRY_S = 0.2
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0

logger = logging.getLogger(__name__)


class StepLogReader:
    """Feeds the channels of live requests from the step log."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        *,
        outage_limit_s: float,
        pool_outage_s: Callable[[], float],
        block_s: float = BLOCK_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._keys = keys
        self._client = connect_async(url)
        self._source = LogSource(url, keys, block_s=block_s)
        self._outage_limit_s = outage_limit_s
        self._live = LiveRequests()
        self._delivery = Delivery(self._live.channels_of, self._live.counters)
        self._adoptions = Adoptions(self._client, keys, self._live)
        self.quiet = QuietRequests(self._client, keys, self._live, pool_outage_s, outage_limit_s, quiet_s)
        self._started = asyncio.Event()
        self._has_lost = False
        """The log lost entries since the last rebuild: what is not in it any more was rolled back."""
        self._hole_since = 0.0
        self._looked_at = 0.0
        self.last_turn: float | None = None
        """Monotonic time of the last successful read, empty or not."""
        self.counters = self._live.counters
        self.is_behind = False
        """Whether the last read brought several steps of one worker: they come faster than they are handled."""

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def channels(self) -> Sequence[TokenChannel]:
        """Of the live requests."""
        return self._live.channels

    @property
    def is_started(self) -> bool:
        """Whether the tail of the log is known: from then on no token can be missed."""
        return self._started.is_set()

    def track(self, channel: TokenChannel) -> None:
        """Follow a request. To be called before it is submitted and after the reader has started."""
        assert self.is_started
        channel.start_id = self._live.position
        self._live.add(channel)

    async def adopt(self, channels: Sequence[TokenChannel]) -> None:
        """Follow requests that were submitted earlier, anywhere, from their first token on; or learn how they ended.

        Raises:
            RedisFailure: Redis did not answer; untrack the channels.
        """
        assert self.is_started
        await self._adoptions.adopt(channels)

    def untrack(self, channel: TokenChannel) -> None:
        """Forget a request: its response is complete or gone."""
        self._live.remove(channel)

    def fail_all(self, code: str, message: str) -> None:
        """End every live request with one error."""
        self._live.fail_all(code, message)

    # ---------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Read until cancelled. Redis failures are waited out with back-off; the position stays."""
        backoff, down_since = MIN_BACKOFF_S, 0.0
        try:
            while True:
                try:
                    await self._turn()
                    backoff, down_since = MIN_BACKOFF_S, 0.0
                except RedisFailure as error:
                    down_since = down_since or now()
                    await self._on_failure(error, now() - down_since)
                    await asyncio.sleep(backoff)
                    backoff = min(backoff * 2, MAX_BACKOFF_S)
        finally:
            await self._adoptions.close()
            await self._client.aclose()
            await self._source.close()

    async def _on_failure(self, error: Exception, down_s: float) -> None:
        self.counters.failures += 1
        position = self._live.position
        logger.warning("step log: %s, down for %.1f s, position %s", type(error).__name__, down_s, position)
        await self._source.disconnect()
        if down_s > self._outage_limit_s:
            self.fail_all("redis_unreachable", "the message log has been unreachable for too long")

    async def _turn(self) -> None:
        if not self._source.is_examined or now() - self._looked_at > LOOK_S:
            await self._look()
        if self._live.rebuild_due:
            async with self._live.at_rest:
                await self._rebuild()
            await self._wait_for_fold()
        entries = await self._source.read(self._live.position)
        if entries is not None:
            async with self._live.at_rest:
                await self._take(entries)
        self.last_turn = time.monotonic()

    async def _look(self) -> None:
        """At the log as a whole, and at requests without news. Find the tail at first; from then on make sure that the
        log is the one that we read and still reaches our position."""
        live = self._live
        async with live.at_rest:
            loss = await self._source.examine(live.position)
            if not self._started.is_set():
                live.position = self._source.tail
                self._started.set()
            elif loss:
                self.counters.losses += 1
                logger.error("step log: %s, position %s: data may be lost", loss, live.position)
                live.position = min(live.position, self._source.tail, key=entry_order)
                live.rebuild_due = self._has_lost = True
        self._looked_at = now()
        if not live.rebuild_due:
            await self.quiet.look()

    async def _take(self, entries: Sequence[Entry]) -> None:
        live, delivery = self._live, self._delivery
        delivery.steps.clear()
        for entry in entries:
            if live.rebuild_due:
                break  # the follower lacks rows: what follows is read again after the rebuild
            live.rebuild_due = delivery.apply(entry, live.follower)
            live.position = entry.entry_id
        self.is_behind = max(delivery.steps.values(), default=0) > 1
        await delivery.end_with_records(self._client, self._keys)

    # ---------------------------------------------------------------- resuming everything

    async def _rebuild(self) -> None:
        """Resume every live request from its record with a fresh follower."""
        live = self._live
        self.counters.rebuilds += 1
        known = live.channels
        records = await read_records(self._client, self._keys, dict.fromkeys(c.request_id for c in known))
        resumptions = [
            r for c in known if (r := restore(c, records[c.request_id], is_rolled_back=self._has_lost)) is not None
        ]
        catch_up = CatchUp(self._client, self._keys, resumptions)
        live.follower = catch_up.follower
        for request_id in live.request_ids:
            if request_id not in records:
                live.follower.track(request_id)  # came meanwhile: its tokens are still to come
        live.rebuild_due = await catch_up.read(live.position, self._delivery.apply)
        self._has_lost = False
        live.position = max(live.position, catch_up.position, key=entry_order)
        for request_id in records:
            if request_id not in live:
                live.follower.untrack(request_id)  # left meanwhile

    async def _wait_for_fold(self) -> None:
        """A hole in the log itself closes when the leader folds the records past it; give up after the outage limit."""
        if not self._live.rebuild_due:
            self._hole_since = 0.0
            return
        self._hole_since = self._hole_since or now()
        if now() - self._hole_since > self._outage_limit_s:
            self.fail_all("log_gap", "a part of the message log is lost")
        await asyncio.sleep(HOLE_RETRY_S)
