"""Prometheus metrics under vLLM's names, behind a prefix of one's own choice."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.health import PoolView

_TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_E2E_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """The gateway's own counters, and the pool's gauges as the leader told them last."""

    def __init__(self, prefix: str, model: str, view: Callable[[], PoolView | None], live: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        success = self._counter(prefix, "request_success", "Requests that ended, by finish reason", "finished_reason")
        aborted = self._counter(prefix, "requests_aborted", "Requests given up before their end", "reason")
        errors = self._counter(prefix, "request_errors", "Requests answered by an error, by code", "code")
        self._success, self._aborted, self._errors = success, aborted, errors
        self.prompt_tokens = self._counter(prefix, "prompt_tokens", "Prompt tokens of accepted requests").labels(model)
        self.generation_tokens = self._counter(prefix, "generation_tokens", "Output tokens that count").labels(model)
        self.time_to_first_token = self._histogram(prefix, "time_to_first_token_seconds", _TTFT_BUCKETS)
        self.inter_token_latency = self._histogram(prefix, "inter_token_latency_seconds", _ITL_BUCKETS)
        self.e2e_request_latency = self._histogram(prefix, "e2e_request_latency_seconds", _E2E_BUCKETS)
        self.registry.register(_PoolCollector(prefix, model, view, live))

    def _counter(self, prefix: str, name: str, doc: str, *labels: str) -> Counter:
        return Counter(prefix + name, doc, ("model_name", *labels), registry=self.registry)

    def _histogram(self, prefix: str, name: str, buckets: tuple[float, ...]) -> Histogram:
        doc = name.replace("_", " ")
        histogram = Histogram(prefix + name, doc, ("model_name",), buckets=buckets, registry=self.registry)
        return histogram.labels(self._model)

    def finished(self, reason: str) -> None:
        """One sequence ended in `reason`."""
        self._success.labels(self._model, reason).inc()

    def aborted(self, cause: str) -> None:
        """One HTTP request was given up."""
        self._aborted.labels(self._model, cause).inc()

    def failed(self, code: str) -> None:
        """One HTTP request was answered by an error."""
        self._errors.labels(self._model, code).inc()

    def observe_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens of one sequence arrived `seconds` after those before."""
        for _ in range(count):
            self.inter_token_latency.observe(seconds / count)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class _PoolCollector(Collector):
    """Gauges of the pool. Absent while no leader tells them: an old number would be a lie."""

    def __init__(self, prefix: str, model: str, view: Callable[[], PoolView | None], live: Callable[[], int]) -> None:
        self._prefix = prefix
        self._model = model
        self._view = view
        self._live = live

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("gateway_live_requests", "Requests that this gateway serves now", self._live())
        view = self._view()
        stats = view.stats if view is not None else None
        if stats is None:
            return
        used = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        yield self._gauge("num_requests_running", "Requests in the batch", stats.num_requests_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue", stats.num_requests_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", used / max(stats.num_blocks, 1))
        yield self._gauge("kv_blocks_total", "KV blocks of all workers", stats.num_blocks)
        yield self._gauge("kv_blocks_free", "KV blocks that hold nothing", stats.num_free_blocks)
        yield self._gauge("kv_blocks_cached", "KV blocks kept only for prefix hits", stats.num_cached_blocks)
        yield self._gauge("num_workers", "Workers in the pool", stats.num_workers)
        yield self._counter("num_preemptions", "Preemptions", stats.num_preemptions)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache", stats.prefix_cache_hits)
        yield self._counter("num_plans", "Step plans", stats.num_plans)
        yield self._counter("num_ignored_messages", "Late, doubled or unknown messages", stats.num_ignored_messages)

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, doc, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, doc, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
