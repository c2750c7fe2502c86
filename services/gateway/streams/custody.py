"""Responses whose client is here are kept; those that nobody has answered for within their window are given up.

Every gateway does both. So a window ends even if the gateway that opened it is gone, and no gateway needs to notice the
death of another one: what it stops pushing ahead lapses.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from shared.keys import Keys
from shared.messages import Abort
from shared.records import read_head
from shared.redis_client import CONNECT_TIMEOUT_S, RedisFailure
from shared.scripts.attachments import LEAST_HELD_S, expire

TURN_S = 0.5
PUSHES_PER_WINDOW = 4
PATIENCE_S = 2.0
"""For an answer of Redis: the time-out of the client that custody is given."""
NEARLY_OVER_S = LEAST_HELD_S / 2
"""A window that ends so soon was shortened by another gateway, which does not know whether we are still there."""
COMING_BACK_S = PATIENCE_S + CONNECT_TIMEOUT_S + 2 * TURN_S
"""After an outage of Redis other gateways, whose commands may hang, find back to it within this time."""
MOST_EXPIRED = 256
"""Given up per turn."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Attachment:
    """One hold on a response, under a number of its own. The leaving of the last one counts."""

    response_id: str
    window_s: float
    """How long it goes on after its gateway died or its client left."""
    number: int = 0
    is_resumable: bool = False
    """Whether it goes on after its client left a living gateway."""
    pushed_at: float = 0.0

    @property
    def held_s(self) -> float:
        """The window while the client is here: it must outlast a gateway that is busy for a moment."""
        return max(self.window_s, LEAST_HELD_S)


class Custody:
    """The attachments of one gateway."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._held: dict[Attachment, None] = {}
        self._may_expire_at = 0.0
        self.num_expired = 0
        """Responses that this gateway gave up for lack of anybody else."""

    def hold(self, attachment: Attachment) -> None:
        """Its client is here: the window, which a script has set just now, stays ahead until `release`."""
        attachment.pushed_at = time.monotonic()
        self._held[attachment] = None

    def release(self, attachment: Attachment) -> None:
        self._held.pop(attachment, None)

    async def run(self) -> None:
        """Push and expire until cancelled. While Redis is away nobody can push: when it is back all do, before any
        window counts as over."""
        self._wait_for_others()
        while True:
            try:
                await self.turn()
            except RedisFailure as error:
                logger.warning("windows: %s", type(error).__name__)
                self._wait_for_others()
            await asyncio.sleep(TURN_S)

    def _wait_for_others(self) -> None:
        self._may_expire_at = time.monotonic() + COMING_BACK_S
        for attachment in self._held:
            attachment.pushed_at = 0.0

    async def turn(self) -> None:
        """Once."""
        seconds, microseconds = await self._client.time()
        now_ms = seconds * 1000 + microseconds // 1000
        await self._push(now_ms)
        if time.monotonic() >= self._may_expire_at:
            await self._expire(now_ms)

    async def _push(self, now_ms: int) -> None:
        if not self._held:
            return
        until_ms = now_ms + NEARLY_OVER_S * 1000
        ending: Any = await self._client.zrangebyscore(self._keys.windows, now_ms, until_ms)
        nearly_over, now = {name.decode() for name in ending}, time.monotonic()
        due = [
            a
            for a in self._held
            if a.response_id in nearly_over or now - a.pushed_at > a.held_s / PUSHES_PER_WINDOW - TURN_S
        ]
        if not due:
            return
        ahead: dict[str, float] = {}
        for attachment in due:
            until = now_ms + attachment.held_s * 1000
            ahead[attachment.response_id] = max(until, ahead.get(attachment.response_id, 0))
        # Only those that are still there: one that ended must not come back.
        await self._client.zadd(self._keys.windows, ahead, xx=True, gt=True)
        for attachment in due:
            attachment.pushed_at = now

    async def _expire(self, now_ms: int) -> None:
        expired: Any = await self._client.zrangebyscore(self._keys.windows, "-inf", now_ms, 0, MOST_EXPIRED)
        for response_id in (name.decode() for name in expired):
            head = await read_head(self._client, self._keys, response_id)
            request_ids = (response_id,) if head is None else head.request_ids
            aborts = [Abort(request_id, "window_expired") for request_id in request_ids]
            if await expire(self._client, self._keys, response_id, aborts):
                self.num_expired += 1
                logger.info("request %s: nobody came back for it within its window", response_id)
