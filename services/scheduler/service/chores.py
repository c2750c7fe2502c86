"""What the leader does at intervals, never per step: each when it is due."""

from collections.abc import Callable

import redis

from services.scheduler.core.diagnostics import Diagnosis, count_by_reason, diagnose_waiting
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.service import logs
from services.scheduler.service.deadlines import Deadlines
from services.scheduler.service.overview import MOST_REQUESTS, OverviewMaker
from services.scheduler.service.position import Position
from services.scheduler.service.queue_counts import LimitsWriter
from services.scheduler.service.queue_times import QueueTimeCounts
from services.scheduler.service.rewriting import rewrite_once
from services.scheduler.service.stall import Stall, StallDetector
from services.scheduler.service.trimmer import Trimmer
from services.scheduler.settings import Settings
from shared.errors import Fenced
from shared.keys import Keys
from shared.messages import FIELD, PoolOverview, PoolStats, QueueTimes, encode
from shared.redis_client import RedisFailure
from shared.scripts import FenceState, parse_fence

STATS_INTERVAL_S = 0.5
STATS_TTL_S = 2.0
LIMITS_INTERVAL_S = 0.05
TRIM_INTERVAL_S = 5.0

Clock = Callable[[], float]


class Every:
    """Something that is due at intervals."""

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next = clock()

    def is_due(self) -> bool:
        return self._clock() >= self._next

    def done(self) -> None:
        """Not again before the interval has passed."""
        self._next = self._clock() + self._interval_s

    def hurry(self) -> None:
        """Due now."""
        self._next = self._clock()

    @property
    def wait_s(self) -> float:
        """Seconds until it is due."""
        return max(0.0, self._next - self._clock())


class Chores:
    """What is due at intervals, and what the leader tells each of them meanwhile."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        settings: Settings,
        limits: LimitsWriter,
        core: SchedulerCore,
        wall: Clock,
        clock: Clock,
    ) -> None:
        self._client, self._keys, self._wall = client, keys, wall
        self.limits = limits
        self.deadlines = Deadlines(request.submission for request in core.requests.values())
        self.queue_times = QueueTimeCounts()
        self.trimmer = Trimmer(
            keys,
            keep_s=settings.log_keep_s,
            keep_bytes=settings.log_keep_bytes,
            keep_usage_s=settings.usage_keep_s,
            most_s=settings.record_ttl_s,
        )
        self._overviews = OverviewMaker()
        self._stalls = StallDetector(settings.stall_after_s, clock)
        self._refused: tuple[tuple[str, int], ...] = ()
        self._num_switches = core.counters.numerics_switches
        self._stats = Every(STATS_INTERVAL_S, clock)
        self._limit = Every(LIMITS_INTERVAL_S, clock)
        self._trim = Every(TRIM_INTERVAL_S, clock)

    def do(self, position: Position, *, epoch: int, num_poisoned: int) -> None:
        """Whatever is due.

        Raises:
            Fenced: somebody else leads, or Redis has an older state than it said to have.
            RedisFailure: Redis did not answer; what was not done is done by the next call.
        """
        self._abort_late(position.core)
        if self._limit.is_due():
            self.limits.write(self._client, position.core)
            self._limit.done()
        if self._stats.is_due():
            self._publish_stats(position, epoch, num_poisoned)
            self._stats.done()
        if self._trim.is_due():
            self.trimmer.run(self._client, self._wall())
            self._trim.done()

    def _abort_late(self, core: SchedulerCore) -> None:
        """By way of intake, so that whoever follows or replays sees it."""
        now = self._wall()
        self.deadlines.forget_ended(core)
        if self.deadlines.next_at() > now:
            return
        late = self.deadlines.take(core, now)
        try:
            for abort in late:
                self._client.xadd(self._keys.intake, {FIELD: encode(abort)})
        except RedisFailure:
            self.deadlines.put_back(late, now)
            raise

    def _publish_stats(self, position: Position, epoch: int, num_poisoned: int) -> None:
        now = self._wall()
        waiting = diagnose_waiting(position.core, MOST_REQUESTS)
        stats = pool_stats(
            position.core,
            waiting,
            self.queue_times.told(),
            epoch=epoch,
            tick=position.tick,
            now=now,
            num_poisoned=num_poisoned,
            stall=self._stalls.look(position.core, waiting),
            refused_writes=self._refused,
        )
        if stats.num_numerics_switches > self._num_switches:
            logs.warning("numerics_switched", num_requests=stats.num_numerics_switches - self._num_switches)
            self._num_switches = stats.num_numerics_switches
        overview = self._overviews.make(position.core, waiting, now)
        fence, run_id = publish_stats(self._client, self._keys, stats, overview, ttl_s=STATS_TTL_S)
        self._refused = tuple(sorted(fence.refused.items()))
        check_fence(fence, position, epoch)
        rewrite_once(self._client, self._keys, fence, run_id)


def check_fence(fence: FenceState, position: Position, epoch: int) -> None:
    """What Redis has must be what this leader committed: one that was restarted may have lost its last second, one that
    was emptied everything, and an idle leader would not notice.

    Raises:
        Fenced: it is not.
    """
    if fence.epoch != epoch:
        raise Fenced(f"epoch {epoch} is stale: Redis has {fence.epoch}")
    if fence.tick < position.tick:
        raise Fenced(f"Redis went back: its last tick is {fence.tick}, {position.tick} was committed")


def pool_stats(
    core: SchedulerCore,
    waiting: list[Diagnosis],
    queue_times: tuple[QueueTimes, ...],
    *,
    epoch: int,
    tick: int,
    now: float,
    num_poisoned: int,
    stall: Stall,
    refused_writes: tuple[tuple[str, int], ...],
) -> PoolStats:
    """The core's gauges as peers see them. `waiting` is what `diagnose_waiting` says, `now` unix time in seconds."""
    stats = core.stats()
    oldest = core.waiting.oldest()
    return PoolStats(
        epoch=epoch,
        tick=tick,
        num_requests_running=stats.num_running,
        num_requests_waiting=stats.num_waiting,
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_preemptions=stats.num_preemptions,
        num_workers=stats.num_workers,
        num_plans=stats.num_plans,
        num_ignored_messages=stats.num_ignored_messages + num_poisoned,
        finished=stats.finished,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
        waiting_by_reason=tuple(count_by_reason(waiting, stats.num_waiting)),
        oldest_wait_s=max(0.0, now - oldest.submission.created) if oldest is not None else 0.0,
        num_requests_swapped=stats.num_swapped,
        num_cpu_blocks=stats.num_cpu_blocks,
        num_free_cpu_blocks=stats.num_free_cpu_blocks,
        num_cached_cpu_blocks=stats.num_cached_cpu_blocks,
        num_swap_outs=stats.num_swap_outs,
        num_swap_ins=stats.num_swap_ins,
        num_demotions=stats.num_demotions,
        num_promotions=stats.num_promotions,
        num_handovers=stats.num_handovers,
        num_requeues=stats.num_requeues,
        num_forks=stats.num_forks,
        num_forked_blocks=stats.num_forked_blocks,
        queue_times=queue_times,
        num_numerics_switches=stats.num_numerics_switches,
        stalled_s=stall.seconds if stall.reason else 0.0,
        stall_reason=stall.reason,
        refused_writes=refused_writes,
    )


def publish_stats(
    client: redis.Redis, keys: Keys, stats: PoolStats, overview: PoolOverview, *, ttl_s: float
) -> tuple[FenceState, str]:
    """Refresh the pool's gauges and its overview, which lapse with the leader; the fence at this moment, and the
    `run_id` of the Redis process."""
    with client.pipeline(transaction=False) as pipe:
        pipe.set(keys.stats, encode(stats), px=int(ttl_s * 1000))
        pipe.set(keys.overview, encode(overview), px=int(ttl_s * 1000))
        pipe.hgetall(keys.fence)
        pipe.info("server")
        *_, fence, server = pipe.execute()
    return parse_fence(fence), server["run_id"]
