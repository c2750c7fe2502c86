"""Gauges are true: what the queue's metrics say is what is there, also after clients left (BEST-07)."""

import json
import socket
import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from services.scheduler.core.scheduler import SchedulerCore
from tests.fakes.gateway_server import RunningGateway
from tests.integration.scheduler.conftest import Pool, Scheduler, wait_for

NUM_TOKENS = 200


def send(gateway: RunningGateway, number: int) -> socket.socket:
    """A streaming request whose client may leave at any time."""
    body: dict[str, Any] = {"model": "bytes", "prompt": f"request {number}", "stream": True, "ignore_eos": True}
    data = json.dumps({**body, "max_tokens": NUM_TOKENS, "priority": number % 3 - 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", gateway.settings.port), timeout=60)
    sock.sendall(head.encode() + data)
    return sock


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    sock.close()
    return b"".join(parts)


class Gauges:
    """One scrape."""

    def __init__(self, gateway: RunningGateway) -> None:
        text = gateway.http.get("/metrics").text
        families = text_string_to_metric_families(text)
        self.samples = [sample for family in families for sample in family.samples]

    def __getitem__(self, name: str) -> float:
        """Sum over further labels."""
        return sum(sample.value for sample in self.samples if sample.name == f"pagewire:{name}")

    def by(self, name: str, label: str) -> dict[str, float]:
        return {s.labels[label]: s.value for s in self.samples if s.name == f"pagewire:{name}"}


def core_of(scheduler: Scheduler) -> SchedulerCore:
    assert scheduler.leader is not None
    return scheduler.leader.position.core


def test_gauges_are_true_while_clients_leave_and_zero_in_the_end(pool: Pool, gateway: RunningGateway) -> None:
    """BEST-07: 200 requests queue, 150 clients leave; a gauge that only grows would drive an autoscaler mad."""
    worker = pool.worker(step_s=0.15, num_blocks=1000)
    scheduler = pool.scheduler().start()
    gateway.wait_ready()
    socks = [send(gateway, number) for number in range(200)]
    wait_for(lambda: pool.health() and Gauges(gateway)["num_requests_waiting"] == 192)
    gauges = Gauges(gateway)
    assert gauges["num_requests_running"] == 8
    assert gauges["gateway_live_requests"] == 200
    assert gauges["queued_requests"] == 192
    assert gauges["oldest_wait_seconds"] > 0
    assert gauges.by("num_requests_waiting_by_reason", "reason") == {"behind": 191, "rows": 1}

    for number, sock in enumerate(socks):
        if number % 4:
            sock.close()
    time.sleep(2.0)
    gauges = Gauges(gateway)
    core = core_of(scheduler)
    assert len(core.requests) == 50, "nothing has ended by itself yet"
    assert gauges["num_requests_running"] == len(core.requests) - len(core.waiting) == 8
    assert gauges["num_requests_waiting"] == len(core.waiting) == 42
    assert sum(gauges.by("num_requests_waiting_by_reason", "reason").values()) == 42
    assert gauges["queued_requests"] == 42
    assert gauges["gateway_live_requests"] == 50
    assert gauges["requests_aborted_total"] == 150

    worker._step_s = 0.0
    assert all(b"[DONE]" in read_all(sock) for sock in socks[::4])
    wait_for(lambda: pool.health() and Gauges(gateway)["kv_cache_usage_perc"] == 0)
    time.sleep(0.6)  # the stats are refreshed twice a second, the gateway's view of them as well
    gauges = Gauges(gateway)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "num_requests_swapped",
        "oldest_wait_seconds",
        "queued_requests",
        "gateway_live_requests",
        "kv_cache_usage_perc",
        "cpu_cache_usage_perc",
    ):
        assert gauges[name] == 0, name
    assert gauges["num_workers"] == 1
    assert gauges.by("request_success_total", "finished_reason") == {"length": 50}
    assert gauges["generation_tokens_total"] >= 50 * NUM_TOKENS


def test_queue_time_is_told_by_class_of_priority(pool: Pool, gateway: RunningGateway) -> None:
    """BEST-26's metric: few classes, each with its requests. One slot, so the later ones wait longer."""
    pool.worker(step_s=0.001, num_blocks=200)
    pool.scheduler(max_num_seqs=1).start()
    gateway.wait_ready()
    for sock in [send(gateway, number) for number in range(9)]:
        assert b"[DONE]" in read_all(sock)
    wait_for(lambda: Gauges(gateway)["request_queue_time_seconds_count"] == 9)
    gauges = Gauges(gateway)
    assert gauges.by("request_queue_time_seconds_count", "priority") == {"high": 3, "normal": 3, "low": 3}
    assert gauges["request_queue_time_seconds_sum"] > 0.1
