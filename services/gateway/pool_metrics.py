"""The pool's metrics, from what its leader told last and from the leases of its members."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.health import PoolView
from shared.histogram import QUEUE_TIME_BOUNDS_S, STEP_TIME_BOUNDS_S, Histogram
from shared.messages import Lease, PoolStats, QueueTimes, WorkerState

_GAUGES: tuple[tuple[str, str, Callable[[PoolStats], float]], ...] = (
    ("num_requests_running", "Requests in a batch", lambda s: s.num_requests_running),
    ("num_requests_waiting", "Requests in the queue", lambda s: s.num_requests_waiting),
    ("num_requests_swapped", "Requests whose KV lies in a host pool", lambda s: s.num_requests_swapped),
    ("oldest_wait_seconds", "Age of the waiting request that came first", lambda s: s.oldest_wait_s),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", lambda s: _share(_num_used(s), s.num_blocks)),
    (
        "cpu_cache_usage_perc",
        "Share of blocks in host memory in use, 0 to 1",
        lambda s: _share(s.num_cpu_blocks - s.num_free_cpu_blocks - s.num_cached_cpu_blocks, s.num_cpu_blocks),
    ),
    ("kv_blocks_total", "KV blocks of all workers", lambda s: s.num_blocks),
    ("kv_blocks_free", "KV blocks that hold nothing", lambda s: s.num_free_blocks),
    ("kv_blocks_cached", "KV blocks kept only for prefix hits", lambda s: s.num_cached_blocks),
    ("cpu_blocks_total", "Blocks in host memory of all workers", lambda s: s.num_cpu_blocks),
    ("cpu_blocks_cached", "Blocks in host memory kept only for prefix hits", lambda s: s.num_cached_cpu_blocks),
    ("num_workers", "Workers in the pool", lambda s: s.num_workers),
)
_COUNTERS: tuple[tuple[str, str, Callable[[PoolStats], float]], ...] = (
    ("num_preemptions", "Preemptions, for lack of blocks or for a fair share", lambda s: s.num_preemptions),
    ("num_handovers", "Requests that left a draining worker for another one", lambda s: s.num_handovers),
    ("num_requeues", "Requests whose worker died under them", lambda s: s.num_requeues),
    ("num_swapped_out_blocks", "Blocks copied to host memory for preempted requests", lambda s: s.num_swap_outs),
    ("num_swapped_in_blocks", "Such blocks whose requests came back", lambda s: s.num_swap_ins),
    ("num_demoted_blocks", "Evicted blocks copied to host memory", lambda s: s.num_demotions),
    ("num_promoted_blocks", "Such blocks copied back on a hit", lambda s: s.num_promotions),
    ("num_forks", "Choices that began with a sibling's prompt", lambda s: s.num_forks),
    ("num_forked_blocks", "Blocks that they shared instead of computing them", lambda s: s.num_forked_blocks),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache", lambda s: s.prefix_cache_queries),
    ("prefix_cache_hits", "Tokens found in the prefix cache", lambda s: s.prefix_cache_hits),
    (
        "num_numerics_switches",
        "Times that a request went on at a worker with other numerics",
        lambda s: s.num_numerics_switches,
    ),
    ("num_plans", "Step plans", lambda s: s.num_plans),
    ("num_ignored_messages", "Late, doubled or unknown messages", lambda s: s.num_ignored_messages),
)


def _num_used(stats: PoolStats) -> int:
    return stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks


def _share(part: int, whole: int) -> float:
    return part / max(whole, 1)


class PoolCollector(Collector):
    """Gauges of the pool. Absent while no leader tells them: an old number would be a lie.

    Every gateway of a pool tells the same: take one of them, or `max`, not the sum.
    """

    def __init__(
        self,
        prefix: str,
        model: str,
        view: Callable[[], PoolView | None],
        live: Callable[[], int],
        tasks: Callable[[], int],
    ) -> None:
        self._prefix = prefix
        self._model = model
        self._view = view
        self._live = live
        self._tasks = tasks

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("gateway_live_requests", "Requests that this gateway serves now", [((), self._live())])
        yield self._gauge("gateway_tasks", "Tasks of this gateway's event loop", [((), self._tasks())])
        view = self._view()
        if view is None:
            return
        states = Counter(worker.state for worker in view.workers)
        by_state = [((str(state),), states[state]) for state in WorkerState]
        yield self._gauge("worker_state", "Worker processes by state", by_state, "state")
        yield self._gauge(
            "queued_requests",
            "Requests never admitted yet, those on their way included",
            [((), view.limits.queued)],
        )
        yield self._step_times(view.workers)
        if view.stats is not None:
            yield from self._of_leader(view.stats)

    def _of_leader(self, stats: PoolStats) -> Iterator[Metric]:
        for name, doc, value in _GAUGES:
            yield self._gauge(name, doc, [((), value(stats))])
        by_reason = [((reason,), count) for reason, count in stats.waiting_by_reason]
        yield self._gauge("num_requests_waiting_by_reason", "Requests in the queue, by what for", by_reason, "reason")
        for name, doc, value in _COUNTERS:
            family = CounterMetricFamily(self._prefix + name, doc, labels=("model_name",))
            family.add_metric((self._model,), value(stats))
            yield family
        refused = CounterMetricFamily(
            self._prefix + "num_refused_writes",
            "Late writes of a worker or leader that had been replaced",
            labels=("model_name", "writer"),
        )
        for writer, count in stats.refused_writes:
            refused.add_metric((self._model, writer), count)
        yield refused
        stalled = [((stats.stall_reason or "none",), stats.stalled_s)]
        yield self._gauge("stalled_seconds", "Work and no progress for so long, by why", stalled, "reason")
        yield self._queue_times(stats.queue_times)

    def _gauge(self, name: str, doc: str, values: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, doc, labels=("model_name", *labels))
        for label_values, value in values:
            family.add_metric((self._model, *label_values), value)
        return family

    def _step_times(self, workers: Iterable[Lease]) -> Metric:
        name, doc = "worker_step_seconds", "Parts of a worker's turn, one observation a step"
        family = HistogramMetricFamily(self._prefix + name, doc, labels=("model_name", "worker", "part"))
        for worker in workers:
            for times in worker.step_times:
                if len(times.counts) == len(STEP_TIME_BOUNDS_S) + 1:  # else a worker of another version
                    histogram = Histogram(STEP_TIME_BOUNDS_S, times.counts, times.total_s)
                    labels = (self._model, worker.name, times.part)
                    family.add_metric(labels, histogram.cumulative(), histogram.total)
        return family

    def _queue_times(self, classes: Iterable[QueueTimes]) -> Metric:
        name, doc = "request_queue_time_seconds", "From arrival to first admission, by class of priority"
        family = HistogramMetricFamily(self._prefix + name, doc, labels=("model_name", "priority"))
        for times in classes:
            if len(times.counts) == len(QUEUE_TIME_BOUNDS_S) + 1:  # else a leader of another version
                histogram = Histogram(QUEUE_TIME_BOUNDS_S, times.counts, times.total_s)
                family.add_metric((self._model, times.priority), histogram.cumulative(), histogram.total)
        return family
