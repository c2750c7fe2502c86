"""Readiness of the pool, from the leases and gauges of the components themselves.

A task polls Redis; endpoints only read the last view. So health does not depend on the request path, and an old view
counts as no view. The first component that is not ready is the reason why requests cannot be served.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from shared.durability import objections
from shared.errors import MemoryFull, ProtocolError, Unavailable
from shared.keys import Keys
from shared.leases import decode_lease, read_members_async
from shared.limits import Limits, read_limits_async
from shared.messages import Decoder, Lease, PoolStats, WorkerState
from shared.redis_client import RedisFailure

POLL_S = 0.5
FRESH_S = 3.0
"""A view older than this says nothing."""

MOST_MEMORY = 0.8
"""Share of Redis' memory at which nothing new is accepted, so that running work can always publish."""
MEMORY_RETRY_S = 5.0

_NEVER_ADMIT = ("shutting_down", "redis_unreachable", "starting")

logger = logging.getLogger(__name__)
_stats: Decoder[PoolStats] = Decoder(PoolStats)


@dataclass(frozen=True, slots=True)
class PoolView:
    """The pool at one moment. `at` is monotonic time."""

    at: float
    leader: Lease | None = None
    workers: tuple[Lease, ...] = ()
    """Those whose lease is alive."""
    stats: PoolStats | None = None
    limits: Limits = field(default_factory=Limits)
    memory_share: float = 0.0
    """Of Redis' `maxmemory`, if there is one."""

    @property
    def saturated_by(self) -> str:
        """What is used up, so that new requests are refused for now: `memory` or `queue`; empty if nothing is."""
        if self.memory_share >= MOST_MEMORY:
            return "memory"
        return "queue" if self.limits.is_full else ""


@dataclass(frozen=True, slots=True)
class Readiness:
    """`reason` is empty if requests can be served, else machine-readable."""

    reason: str = ""
    message: str = ""
    progress: float | None = None

    @property
    def is_ready(self) -> bool:
        return not self.reason


READY = Readiness()
UNKNOWN = Readiness("unknown", "Redis did not tell")


def assess(view: PoolView) -> dict[str, Readiness]:
    """Scheduler and workers, as a fresh view shows them."""
    leader = READY if view.leader is not None else Readiness("no_leader", "no scheduler is alive")
    return {"scheduler": leader, "workers": _assess_workers(view)}


def first_unready(components: Mapping[str, Readiness]) -> Readiness:
    """The reason why requests cannot be served, or that they can."""
    return next((state for state in components.values() if not state.is_ready), READY)


def _assess_workers(view: PoolView) -> Readiness:
    states = [w.state for w in view.workers]
    if WorkerState.READY in states:
        if view.stats is None or view.stats.num_workers == 0 or not view.limits.max_request_tokens:
            return Readiness("worker_joining", "the scheduler has not admitted a worker yet")
        return READY
    if WorkerState.LOADING in states:
        progress = max(w.progress for w in view.workers if w.state is WorkerState.LOADING)
        return Readiness("loading", f"the model is loading ({progress:.0%})", progress)
    return Readiness("no_worker", "no worker is alive")


class PoolMonitor:
    """Polls the pool; tells readiness at any moment without waiting."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, admission_grace_s: float) -> None:
        self._client = client
        self._keys = keys
        self._admission_grace_s = admission_grace_s
        self._started = time.monotonic()
        self._last_ready: float | None = None
        self._reachable = True
        self._said: list[str] = []
        self.draining = False
        self.view: PoolView | None = None

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                async with asyncio.timeout(FRESH_S):
                    await self.poll()
            except RedisFailure as error:
                if self._reachable:
                    logger.warning("pool: %s", type(error).__name__)
                self._reachable = False
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Take one view."""
        values: Any = await self._client.mget([self._keys.leader_lease, self._keys.stats])
        leader, stats = values
        members = await read_members_async(self._client, self._keys)
        limits = await read_limits_async(self._client, self._keys)
        workers = tuple(m for m in members.values() if m is not None and m.service == "gpu_worker")
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.info("memory")
            pipe.info("persistence")
            memory, persistence = await pipe.execute()
        self._say_once(objections(memory | persistence))
        share = memory.get("used_memory", 0) / memory["maxmemory"] if memory.get("maxmemory") else 0.0
        self.view = PoolView(time.monotonic(), decode_lease(leader), workers, _decode_stats(stats), limits, share)
        self._reachable = True
        if first_unready(assess(self.view)).is_ready:
            self._last_ready = self.view.at

    def _say_once(self, texts: list[str]) -> None:
        """What is wrong with this Redis: when it is found, and when it changes."""
        for text in texts:
            if text not in self._said:
                logger.warning("%s", text)
        self._said = texts

    @property
    def components(self) -> dict[str, Readiness]:
        """Each part that serving needs, now. Of what is behind a Redis that does not answer nothing is known."""
        gateway = Readiness("shutting_down", "this gateway is shutting down") if self.draining else READY
        view = self.view
        if not self._reachable or (view is not None and time.monotonic() - view.at > FRESH_S):
            redis_state = Readiness("redis_unreachable", "Redis does not answer")
        elif view is None:
            redis_state = Readiness("starting", "this gateway is starting")
        else:
            return {"gateway": gateway, "redis": READY, **assess(view)}
        return {"gateway": gateway, "redis": redis_state, "scheduler": UNKNOWN, "workers": UNKNOWN}

    @property
    def readiness(self) -> Readiness:
        """Of this gateway and its pool, now."""
        return first_unready(self.components)

    def outage_s(self) -> float:
        """Seconds since the pool was last ready."""
        last = self._started if self._last_ready is None else self._last_ready
        return time.monotonic() - last

    def admit(self, *, reader_started: bool) -> Limits:
        """Limits to validate a new request against. `reader_started`: answers could be read.

        Raises:
            MemoryFull: what is left of Redis' memory is for requests that run.
            Unavailable: the pool cannot take requests. One that was ready a moment ago still can: the log keeps them.
        """
        state = self.readiness
        lately = self._last_ready is not None and self.outage_s() <= self._admission_grace_s
        tolerable = state.is_ready or (lately and state.reason not in _NEVER_ADMIT)
        if tolerable and not reader_started:
            tolerable, state = False, Readiness("starting", "this gateway is starting")
        if self.view is None or not tolerable:
            raise Unavailable(state.message, reason=state.reason)
        if self.view.saturated_by == "memory":
            raise MemoryFull("Redis is nearly full; try again later", retry_after_s=MEMORY_RETRY_S)
        return self.view.limits


def _decode_stats(data: Any) -> PoolStats | None:
    try:
        return None if data is None else _stats.decode(data)
    except ProtocolError:
        return None
