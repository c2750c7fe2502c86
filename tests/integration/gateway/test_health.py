"""Readiness tells the truth with a reason, from the components' own evidence, while liveness never wavers."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.gateway.text.tokenizer import TextTokenizer
from shared import scripts
from shared.keys import Keys
from shared.leases import LeaseKeeper, new_instance
from shared.limits import write_limits
from shared.messages import Lease, PoolStats, WorkerState, encode
from tests.fakes.byte_model import answer
from tests.fakes.gateway_server import RunningGateway
from tests.fakes.sse_reader import parse_sse
from tests.integration.gateway.conftest import OpenScene, Scene


@pytest.fixture
def lonely(redis_url: str, byte_model: Path, byte_tokenizer: TextTokenizer) -> Iterator[RunningGateway]:
    """A gateway without a pool."""
    with RunningGateway(byte_tokenizer, model=byte_model, redis_url=redis_url) as gateway:
        yield gateway


def test_reasons_in_the_order_of_a_start(
    lonely: RunningGateway, redis_client: redis.Redis, keys: Keys, redis_url: str
) -> None:
    def ready() -> Any:
        answered = lonely.http.get("/health/ready")
        assert answered.status_code == (200 if answered.json()["status"] == "ready" else 503)
        assert answered.status_code == 200 or "retry-after" in answered.headers
        return answered.json()

    lonely.wait_for(lambda: ready()["reason"] == "no_leader")
    lead = Lease("scheduler", "s", "i", 0, WorkerState.READY)
    epoch = scripts.acquire(redis_client, keys, instance="i", ttl_ms=60_000, lease=lead)
    lonely.wait_for(lambda: ready()["reason"] == "no_worker")
    worker = Lease("gpu_worker", "w", new_instance(), 0, WorkerState.LOADING, progress=0.25)
    keeper = LeaseKeeper(redis_url, keys, worker).start()
    try:
        lonely.wait_for(lambda: ready()["reason"] == "loading")
        assert ready()["progress"] == 0.25 and "25%" in ready()["message"]
        refused = lonely.http.post("/v1/completions", json={"model": "bytes", "prompt": "x"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
        keeper.update(state=WorkerState.READY)
        lonely.wait_for(lambda: ready()["reason"] == "worker_joining")
        write_limits(redis_client, keys, max_model_len=512, max_request_tokens=512)
        redis_client.set(keys.stats, encode(PoolStats(epoch, 1, 0, 0, 10, 10, 0, 0, 1, 0, 0)))
        lonely.wait_for(lambda: ready()["status"] == "ready")
        assert "stalled" not in ready()
        assert "warning" not in lonely.http.get("/health").json()["workers"][0]
        keeper.update(warning="no C++ kernels")
        lonely.wait_for(lambda: lonely.http.get("/health").json()["workers"][0].get("warning") == "no C++ kernels")
        stalled = PoolStats(epoch, 1, 3, 0, 10, 5, 0, 0, 1, 0, 0, stalled_s=7.25, stall_reason="step")
        redis_client.set(keys.stats, encode(stalled))
        lonely.wait_for(lambda: ready().get("stalled") == {"seconds": 7.2, "reason": "step"})
        assert ready()["status"] == "ready", "what is new may still be queued"
        keeper.update(state=WorkerState.DRAINING)
        lonely.wait_for(lambda: ready().get("reason") == "no_worker")
    finally:
        keeper.stop()
    redis_client.delete(keys.leader_lease)
    lonely.wait_for(lambda: ready()["reason"] == "no_leader")
    assert lonely.http.get("/health/live").json() == {"status": "live"}
    assert lonely.http.get("/health").status_code == 503


def test_every_component_tells_its_state_and_the_first_that_is_not_ready_is_the_reason(
    lonely: RunningGateway, redis_client: redis.Redis, keys: Keys
) -> None:
    def states() -> dict[str, str]:
        answered = lonely.http.get("/health/ready").json()
        states = {name: part.get("reason", part["status"]) for name, part in answered["components"].items()}
        assert answered["reason"] == next(state for state in states.values() if state != "ready")
        return states

    lonely.wait_for(lambda: states()["redis"] == "ready" and states()["step_log"] == "ready")
    assert states() == {
        "gateway": "ready",
        "redis": "ready",
        "scheduler": "no_leader",
        "workers": "no_worker",
        "step_log": "ready",
    }
    lead = Lease("scheduler", "s", "i", 0, WorkerState.READY)
    scripts.acquire(redis_client, keys, instance="i", ttl_ms=60_000, lease=lead)
    lonely.wait_for(lambda: states()["scheduler"] == "ready")
    assert states()["workers"] == "no_worker"
    lonely.state.monitor._reachable = False
    unknown = lonely.state.components
    assert (unknown["redis"].reason, unknown["scheduler"].reason) == ("redis_unreachable", "unknown")


def test_a_full_queue_saturates_but_does_not_make_unready(open_scene: OpenScene) -> None:
    scene = open_scene(pool_cap_requests=1)
    scene.pool.pause()
    time.sleep(0.1)
    with scene.gateway.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.status_code == 200
        scene.gateway.wait_for(lambda: scene.gateway.http.get("/health/ready").json()["saturated"])
        answered = scene.gateway.http.get("/health/ready")
        assert answered.status_code == 200 and answered.json()["saturated_by"] == "queue"
        assert scene.post("/v1/completions", prompt="y").status_code == 429
        scene.pool.resume()
        assert parse_sse(response.iter_lines()).is_done
    scene.gateway.wait_for(lambda: not scene.gateway.http.get("/health/ready").json()["saturated"])


def test_what_redis_may_lose_is_said_once(
    redis_client: redis.Redis, open_scene: OpenScene, caplog: pytest.LogCaptureFixture
) -> None:
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        scene = open_scene()
        view = scene.gateway.state.monitor.view
        scene.gateway.wait_for(lambda: scene.gateway.state.monitor.view is not view)
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")
    assert sum("allkeys-lru" in record.getMessage() for record in caplog.records) == 1


def test_a_pool_that_was_ready_a_moment_ago_still_takes_requests(open_scene: OpenScene) -> None:
    scene = open_scene(admission_grace_s=30)
    for lease in scene.pool._leases:
        lease.stop()
    scene.pool._leases = []
    scene.gateway.wait_for(lambda: scene.gateway.http.get("/health/ready").json().get("reason") == "no_worker")
    assert scene.text_of("x") == "OK: x"


def test_redis_absent_at_start_is_waited_for(byte_model: Path, byte_tokenizer: TextTokenizer) -> None:
    """Case 116."""
    url = "redis://127.0.0.1:1/0"
    with RunningGateway(byte_tokenizer, model=byte_model, redis_url=url) as gateway:
        gateway.wait_for(lambda: gateway.http.get("/health/ready").json()["reason"] == "redis_unreachable")
        assert gateway.http.get("/v1/models").json()["data"][0]["id"] == "bytes"
        assert gateway.http.post("/v1/completions", json={"prompt": "x"}).status_code == 503


def test_the_summary_and_the_lease_describe_the_gateway(scene: Scene, redis_client: redis.Redis, keys: Keys) -> None:
    body = scene.gateway.http.get("/health").json()
    assert body["status"] == "ready" and body["workers"][0]["state"] == "ready" and body["max_model_len"] == 512
    members: Any = redis_client.smembers(keys.members)
    assert sum(b"gateway:gateway-0:" in name for name in members) == 1


def test_metrics_count_requests_and_tokens(scene: Scene) -> None:
    scene.scripts["abc"] = answer("12345")
    for stream in (True, False, True):
        scene.gateway.http.post("/v1/completions", json={"prompt": "abc", "stream": stream})
    scene.gateway.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    scene.gateway.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 0})
    metric = scene.gateway.metric
    assert metric("request_success_total", finished_reason="stop") == 3
    assert metric("request_success_total", finished_reason="length") == 1
    assert metric("request_errors_total", code="invalid_value") == 1
    assert metric("prompt_tokens_total") == 12 and metric("generation_tokens_total") == 3 * 6 + 2
    assert metric("time_to_first_token_seconds_count") == 4 and metric("e2e_request_latency_seconds_count") == 4
    assert metric("inter_token_latency_seconds_count") <= 20 - 4
    text = scene.gateway.http.get("/metrics").text
    for line in ("pagewire:num_requests_running{", "pagewire:num_requests_waiting{", "pagewire:kv_cache_usage_perc{",
                 "pagewire:kv_blocks_total{", "pagewire:kv_blocks_free{", "pagewire:kv_blocks_cached{",
                 "pagewire:num_preemptions_total{"):  # fmt: skip
        assert line in text


def test_the_metrics_prefix_is_a_setting(open_scene: OpenScene) -> None:
    text = open_scene(metrics_prefix="vllm:").gateway.http.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="bytes"}' in text and "pagewire:" not in text


def test_liveness_is_quick_while_long_prompts_pour_in(scene: Scene) -> None:
    """BEST-03 in small: tokenizing does not hold up the event loop."""
    stop, latencies = threading.Event(), []
    body = {"prompt": ["word " * 90] * 16, "max_tokens": 1}

    def pour() -> None:
        with httpx.Client(base_url=scene.gateway.url, timeout=60, trust_env=False) as client:
            while not stop.is_set():
                assert client.post("/v1/completions", json=body).status_code == 200

    threads = [threading.Thread(target=pour) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        start = time.monotonic()
        assert scene.gateway.http.get("/health/live").status_code == 200
        latencies.append(time.monotonic() - start)
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert sorted(latencies)[-2] < 0.5
