"""Names, labels and values of the metrics, and the page that lists them."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from services.gateway.health import PoolView
from services.gateway.metrics import Metrics
from services.gateway.metrics_table import metrics_table
from shared.histogram import QUEUE_TIME_BOUNDS_S, STEP_TIME_BOUNDS_S
from shared.messages import Lease, PoolStats, QueueTimes, StepTimes, WorkerState

PAGE = Path(__file__).parents[3] / "infra" / "metrics.md"

VLLM_NAMES = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason num_requests_swapped kv_cache_usage_perc
cpu_cache_usage_perc num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total request_success_total
prompt_tokens_total prompt_tokens_cached_total generation_tokens_total time_to_first_token_seconds
inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds request_decode_time_seconds
request_time_per_output_token_seconds request_prompt_tokens request_generation_tokens request_params_max_tokens
request_params_n
"""


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, value of the one further label) → value, as a scraper reads it."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "m"
            rest = [value for label, value in sample.labels.items() if label != "model_name"]
            found[sample.name, rest[-1] if rest else ""] = sample.value
    return found


def make_metrics(stats: PoolStats | None = None, prefix: str = "vllm:") -> Metrics:
    return Metrics(prefix, "m", lambda: PoolView(0.0, stats=stats), live=lambda: 3, tasks=lambda: 7)


def test_the_page_lists_every_metric() -> None:
    assert PAGE.read_text().endswith("\n\n" + metrics_table())


def test_vllms_names_are_all_there() -> None:
    listed = {line.split("`")[1] for line in metrics_table().splitlines() if line.startswith("| `")}
    assert set(VLLM_NAMES.split()) <= listed


def test_what_the_leader_told_is_shown() -> None:
    counts = [0] * (len(QUEUE_TIME_BOUNDS_S) + 1)
    counts[3] = 2
    stats = PoolStats(
        1, 2, num_requests_running=5, num_requests_waiting=7, num_blocks=100, num_free_blocks=20, num_cached_blocks=30,
        num_preemptions=4, num_workers=2, num_plans=9, num_ignored_messages=0, prefix_cache_queries=60,
        prefix_cache_hits=40, num_requests_swapped=1, waiting_by_reason=(("behind", 6), ("blocks", 1)),
        oldest_wait_s=2.5, num_cpu_blocks=10, num_free_cpu_blocks=3, num_cached_cpu_blocks=1, num_handovers=8,
        queue_times=(QueueTimes("low", tuple(counts), 0.4),), num_numerics_switches=2, stalled_s=6.5,
        stall_reason="no_worker", refused_writes=(("leader", 1), ("worker-0", 3)),
    )  # fmt: skip
    found = samples(make_metrics(stats))
    assert found["vllm:num_requests_running", ""] == 5
    assert found["vllm:num_requests_waiting", ""] == 7
    assert found["vllm:num_requests_waiting_by_reason", "behind"] == 6
    assert found["vllm:num_requests_waiting_by_reason", "blocks"] == 1
    assert found["vllm:num_requests_swapped", ""] == 1
    assert found["vllm:kv_cache_usage_perc", ""] == 0.5
    assert found["vllm:cpu_cache_usage_perc", ""] == 0.6
    assert found["vllm:num_preemptions_total", ""] == 4
    assert found["vllm:num_handovers_total", ""] == 8
    assert found["vllm:num_numerics_switches_total", ""] == 2
    assert found["vllm:num_refused_writes_total", "leader"] == 1
    assert found["vllm:num_refused_writes_total", "worker-0"] == 3
    assert found["vllm:stalled_seconds", "no_worker"] == 6.5
    assert found["vllm:prefix_cache_hits_total", ""] == 40
    assert found["vllm:request_queue_time_seconds_count", "low"] == 2
    assert found["vllm:request_queue_time_seconds_sum", "low"] == 0.4
    assert found["vllm:oldest_wait_seconds", ""] == 2.5


def test_old_numbers_of_the_pool_are_not_shown() -> None:
    names = {name for name, _ in samples(make_metrics(None))}
    assert {"vllm:gateway_live_requests", "vllm:gateway_tasks"} <= names and "vllm:num_requests_running" not in names


def test_a_leader_of_another_version_breaks_nothing() -> None:
    stats = PoolStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, queue_times=(QueueTimes("low", (1, 2), 3.0),))
    assert ("vllm:request_queue_time_seconds_count", "low") not in samples(make_metrics(stats))


def test_the_step_profile_of_each_worker_is_shown() -> None:
    counts = [0] * (len(STEP_TIME_BOUNDS_S) + 1)
    counts[2] = 3
    profile = (StepTimes("attention", tuple(counts), 0.006), StepTimes("of another version", (1, 2), 3.0))
    worker = Lease("gpu_worker", "worker-0", "i", 1, WorkerState.READY, step_times=profile)
    metrics = Metrics("", "m", lambda: PoolView(0.0, workers=(worker,)), live=int, tasks=int)
    found = [
        (sample.name, sample.labels["worker"], sample.labels["part"], sample.value)
        for family in text_string_to_metric_families(metrics.render().decode())
        if family.name == "worker_step_seconds"
        for sample in family.samples
        if "le" not in sample.labels
    ]
    assert ("worker_step_seconds_count", "worker-0", "attention", 3.0) in found
    assert ("worker_step_seconds_sum", "worker-0", "attention", 0.006) in found
    assert {part for _, _, part, _ in found} == {"attention"}


def test_one_event_with_many_tokens_is_one_observation_of_all_of_them() -> None:
    metrics = make_metrics(prefix="pagewire:")
    metrics.observe_tokens(1000, 20.0)
    metrics.observe_tokens(1, 0.2)
    found = samples(metrics)
    assert found["pagewire:inter_token_latency_seconds_count", ""] == 1001
    assert abs(found["pagewire:inter_token_latency_seconds_sum", ""] - 20.2) < 1e-9
    assert found["pagewire:inter_token_latency_seconds_bucket", "0.025"] == 1000
    assert found["pagewire:inter_token_latency_seconds_bucket", "+Inf"] == 1001
    assert len(metrics.inter_token_latency.counts) == 18, "nothing is kept per token"


def test_a_request_is_observed_at_its_beginning_and_its_end() -> None:
    metrics = make_metrics()
    metrics.accepted(num_prompt_tokens=300, max_tokens=64, num_choices=2)
    metrics.completed(num_tokens=11, seconds=2.0, decode_s=1.0)
    metrics.completed(num_tokens=1, seconds=0.2, decode_s=0.0)
    found = samples(metrics)
    assert found["vllm:prompt_tokens_total", ""] == 300
    assert found["vllm:request_prompt_tokens_sum", ""] == 300
    assert found["vllm:request_params_max_tokens_sum", ""] == 64
    assert found["vllm:request_params_n_sum", ""] == 2
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 2
    assert found["vllm:request_generation_tokens_sum", ""] == 12
    assert found["vllm:request_decode_time_seconds_count", ""] == 1, "one token has no time between tokens"
    assert abs(found["vllm:request_time_per_output_token_seconds_sum", ""] - 0.1) < 1e-9
