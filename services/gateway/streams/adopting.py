"""Requests that another gateway, or another stream, followed before: from their first token on, or how they ended.

record of A    ######------------------|            #  folded output
record of B    ##########--------------|            -  read again from the log
                                       position, where A and B change over to this process's follower
"""

import asyncio
from collections.abc import Sequence

import redis.asyncio

from services.gateway.cancelling import cancel_and_wait
from services.gateway.streams.catch_up import CatchUp, read_records, restore
from services.gateway.streams.channel import TokenChannel
from services.gateway.streams.delivery import Delivery
from services.gateway.streams.live_requests import LiveRequests, now
from shared.keys import Keys
from shared.step_log import StepLogFollower
from shared.streams import START, entry_order

BEHIND_S = 2.0
"""An adopted request's record may be ahead of this process for so long; then everything is rebuilt."""

Newcomers = list[tuple[Sequence[TokenChannel], "asyncio.Future[None]"]]
"""Channels of each adoption, and who waits for it."""


class Adoptions:
    """Those that come at the same time, as after the death of another gateway, share one reading of the log."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, live: LiveRequests) -> None:
        self._client = client
        self._keys = keys
        self._live = live
        self._newcomers: Newcomers = []
        self._work: asyncio.Task[None] | None = None

    async def adopt(self, channels: Sequence[TokenChannel]) -> None:
        """Return when the channels are followed, or have ended.

        Raises:
            RedisFailure: Redis did not answer; untrack the channels.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._newcomers.append((channels, done))
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._adopt_all())
        await done

    async def close(self) -> None:
        if self._work is not None:
            await cancel_and_wait(self._work)

    async def _adopt_all(self) -> None:
        while self._newcomers:
            newcomers, self._newcomers = self._newcomers, []
            try:
                await self._adopt(newcomers)
            except Exception as error:
                for _, done in newcomers:
                    if not done.done():
                        done.set_exception(error)

    async def _adopt(self, newcomers: Newcomers) -> None:
        """They are read by a follower of their own; where that stands where this process stands, they change over."""
        live = self._live
        live.counters.adoptions += 1
        adopted: dict[str, list[TokenChannel]] = {}
        for channels, _ in newcomers:
            for channel in channels:
                channel.start_id = START
                adopted.setdefault(channel.request_id, []).append(channel)
        records = await read_records(self._client, self._keys, adopted)
        resumptions = [r for i in adopted for c in adopted[i] if (r := restore(c, records[i])) is not None]
        catch_up = CatchUp(self._client, self._keys, resumptions)
        delivery = Delivery(adopted.__getitem__, live.counters)
        missing = await catch_up.read(live.position, delivery.apply) if resumptions else False
        is_close = await self._wait_for_position(catch_up.position)
        async with live.at_rest:
            if is_close and resumptions:
                missing = await catch_up.read(live.position, delivery.apply) or missing
            for channels, done in newcomers:
                if not done.cancelled():
                    self._change_over(channels, catch_up.follower)
            live.rebuild_due |= missing or not is_close
            await delivery.end_with_records(self._client, self._keys)
        for _, done in newcomers:
            if not done.done():
                done.set_result(None)

    def _change_over(self, channels: Sequence[TokenChannel], follower: StepLogFollower) -> None:
        for channel in channels:
            if channel.ending is None:
                self._live.add(channel, *follower.place_of(channel.request_id))

    async def _wait_for_position(self, entry_id: str) -> bool:
        """A record may be ahead of this process: wait until it is not. Whether that was so in time."""
        until = now() + BEHIND_S
        while entry_order(self._live.position) < entry_order(entry_id):
            if now() > until:
                return False
            await asyncio.sleep(0.002)
        return True
