"""Prometheus metrics under vLLM's names, behind a prefix of one's own choice. `infra/metrics.md` lists them all.

Everything here runs in the event loop. Histograms are plain counts: an observation costs a binary search, and an event
that carries several tokens is one observation.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.gateway.health import PoolView
from services.gateway.pool_metrics import PoolCollector
from shared.histogram import Histogram

_TTFT_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_E2E_BOUNDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKEN_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_COUNT_BOUNDS = (1, 2, 5, 10, 20)


class Metrics:
    """The gateway's own counters, and the pool's gauges as the leader told them last."""

    def __init__(
        self,
        prefix: str,
        model: str,
        view: Callable[[], PoolView | None],
        live: Callable[[], int],
        tasks: Callable[[], int],
    ) -> None:
        """`live`, `tasks`: requests and event-loop tasks that this gateway has now."""
        self.registry = CollectorRegistry()
        self._model = model
        success = self._counter(prefix, "request_success", "Requests that ended, by finish reason", "finished_reason")
        aborted = self._counter(prefix, "requests_aborted", "Requests given up before their end", "reason")
        detached = self._counter(
            prefix, "requests_detached", "Requests that went on for their window without a client", "reason"
        )
        self._resumed = self._counter(
            prefix, "requests_resumed", "Streams over a request that was there before"
        ).labels(model)
        errors = self._counter(prefix, "request_errors", "Requests answered by an error, by code", "code")
        self._success, self._aborted, self._errors, self._detached = success, aborted, errors, detached
        self.prompt_tokens = self._counter(prefix, "prompt_tokens", "Prompt tokens of accepted requests").labels(model)
        self.cached_tokens = self._counter(prefix, "prompt_tokens_cached", "Of them, cached ones").labels(model)
        self.generation_tokens = self._counter(prefix, "generation_tokens", "Output tokens that count").labels(model)
        self._histograms = _Histograms(prefix, model)
        add = self._histograms.add
        self.time_to_first_token = add("time_to_first_token_seconds", "From arrival to first token", _TTFT_BOUNDS)
        self.inter_token_latency = add("inter_token_latency_seconds", "Between tokens of a sequence", _ITL_BOUNDS)
        self.e2e_request_latency = add("e2e_request_latency_seconds", "From arrival to the end", _E2E_BOUNDS)
        self.time_per_output_token = add(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens", _ITL_BOUNDS
        )
        self.decode_time = add("request_decode_time_seconds", "From first to last token", _E2E_BOUNDS)
        self.request_prompt_tokens = add("request_prompt_tokens", "Prompt tokens of a request", _TOKEN_BOUNDS)
        self.request_generation_tokens = add("request_generation_tokens", "Output tokens of a request", _TOKEN_BOUNDS)
        self.request_max_tokens = add("request_params_max_tokens", "max_tokens of a request", _TOKEN_BOUNDS)
        self.request_n = add("request_params_n", "Choices of a prompt", _COUNT_BOUNDS)
        self.registry.register(self._histograms)
        self.registry.register(PoolCollector(prefix, model, view, live, tasks))

    def _counter(self, prefix: str, name: str, doc: str, *labels: str) -> Counter:
        return Counter(prefix + name, doc, ("model_name", *labels), registry=self.registry)

    def accepted(self, num_prompt_tokens: int, max_tokens: int, num_choices: int) -> None:
        """One prompt was queued."""
        self.prompt_tokens.inc(num_prompt_tokens)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request_max_tokens.observe(max_tokens)
        self.request_n.observe(num_choices)

    def finished(self, reason: str) -> None:
        """One sequence ended in `reason`."""
        self._success.labels(self._model, reason).inc()

    def completed(self, num_tokens: int, seconds: float, decode_s: float) -> None:
        """One sequence has all of its tokens, `seconds` after its request arrived, `decode_s` after the first one."""
        self.e2e_request_latency.observe(seconds)
        self.request_generation_tokens.observe(num_tokens)
        if num_tokens > 1:
            self.decode_time.observe(decode_s)
            self.time_per_output_token.observe(decode_s / (num_tokens - 1))

    def aborted(self, cause: str) -> None:
        """One HTTP request was given up."""
        self._aborted.labels(self._model, cause).inc()

    def detached(self, cause: str) -> None:
        """One HTTP request goes on without its client."""
        self._detached.labels(self._model, cause).inc()

    def resumed(self) -> None:
        """A client took a request up that another stream had served."""
        self._resumed.inc()

    def failed(self, code: str) -> None:
        """One HTTP request was answered by an error."""
        self._errors.labels(self._model, code).inc()

    def observe_tokens(self, count: int, seconds: float) -> None:
        """`count` tokens of one sequence arrived `seconds` after those before."""
        self.inter_token_latency.observe(seconds / count, count)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class _Histograms(Collector):
    """Histograms of one model."""

    def __init__(self, prefix: str, model: str) -> None:
        self._prefix = prefix
        self._model = model
        self._all: list[tuple[str, str, Histogram]] = []

    def add(self, name: str, doc: str, bounds: tuple[float, ...]) -> Histogram:
        histogram = Histogram(bounds)
        self._all.append((name, doc, histogram))
        return histogram

    def collect(self) -> Iterator[Metric]:
        for name, doc, histogram in self._all:
            family = HistogramMetricFamily(self._prefix + name, doc, labels=("model_name",))
            family.add_metric((self._model,), histogram.cumulative(), histogram.total)
            yield family
