"""What the leader does at intervals, never per step: each when it is due."""

from collections.abc import Callable

import redis

from services.scheduler.core.diagnostics import Diagnosis, count_by_reason
from services.scheduler.core.scheduler import SchedulerCore
from shared.keys import Keys
from shared.messages import PoolOverview, PoolStats, QueueTimes, encode


class Every:
    """Something that is due at intervals."""

    def __init__(self, interval_s: float, clock: Callable[[], float]) -> None:
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


def pool_stats(
    core: SchedulerCore,
    waiting: list[Diagnosis],
    queue_times: tuple[QueueTimes, ...],
    *,
    epoch: int,
    tick: int,
    now: float,
    num_poisoned: int,
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
    )


def publish_stats(client: redis.Redis, keys: Keys, stats: PoolStats, overview: PoolOverview, *, ttl_s: float) -> None:
    """Refresh the pool's gauges and its overview; they lapse with the leader."""
    with client.pipeline(transaction=False) as pipe:
        pipe.set(keys.stats, encode(stats), px=int(ttl_s * 1000))
        pipe.set(keys.overview, encode(overview), px=int(ttl_s * 1000))
        pipe.execute()
