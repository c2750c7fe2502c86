"""Clients that leave, in every state of their request, leave nothing behind (BEST-06); each ending is accounted for."""

import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest

from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import Decoder, FinishReason, UsageRecord
from shared.streams import scan
from tests.fakes.gateway_server import RunningGateway
from tests.integration.scheduler.conftest import Pool, Scheduler, wait_for


@dataclass
class Stage:
    """Pool and gateway, and what a test looks at."""

    pool: Pool
    gateway: RunningGateway
    scheduler: Scheduler

    @property
    def core(self) -> SchedulerCore:
        assert self.scheduler.leader is not None
        return self.scheduler.leader.position.core

    def send(self, stream: bool, num_prompt: int, max_tokens: int) -> socket.socket:
        body = {"prompt": [65 + i % 20 for i in range(num_prompt)], "stream": stream, "ignore_eos": True}
        data = json.dumps({**body, "max_tokens": max_tokens}).encode()
        sock = socket.create_connection(("127.0.0.1", self.gateway.settings.port), timeout=30)
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def has(self, holds: Callable[[Request], bool]) -> bool:
        return any(map(holds, list(self.core.requests.values())))

    def is_idle(self) -> bool:
        """No request, no row, no block but those that are kept for hits."""
        self.pool.health()
        core = self.core
        free = all(
            lane.pool.num_free + lane.pool.num_cached == lane.pool.num_blocks and not lane.seats
            for lane in list(core.lanes.values())
        )
        return not core.requests and free and self.gateway.state.engine.reader.num_live == 0

    def usages(self) -> list[UsageRecord]:
        decoder: Decoder[UsageRecord] = Decoder(UsageRecord)
        return [decoder.decode(payload) for _, payload in scan(self.pool.client, self.pool.keys.usage)]


@pytest.fixture
def stage(pool: Pool, gateway: RunningGateway) -> Stage:
    return Stage(pool, gateway, pool.scheduler())


def leave(sock: socket.socket, how: str) -> None:
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    if how == "half_close":
        sock.shutdown(socket.SHUT_WR)
        with sock:
            sock.settimeout(5)
            while sock.recv(65536):  # the gateway takes it for leaving, and closes
                pass
    sock.close()


def is_decoding(request: Request) -> bool:
    return request.seat is not None and request.seat.first > 0


STATES: dict[str, tuple[int, Callable[[Request], bool]]] = {
    "prefilling": (200, lambda request: request.state is RequestState.RUNNING and not is_decoding(request)),
    "decoding": (4, is_decoding),
}


CASES = list(product((True, False), ("close", "half_close", "reset")))


def test_leaving_ends_the_request_in_every_state(stage: Stage) -> None:
    """While the prompt is computed, while tokens come, while it waits; streamed or not; close, half-close, reset. While
    it is swapped out: below."""
    stage.scheduler.start()
    stage.pool.worker(step_s=0.05, num_blocks=600)
    stage.gateway.wait_ready()
    for (num_prompt, holds), (stream, how) in product(STATES.values(), CASES):
        sock = stage.send(stream, num_prompt, max_tokens=50)
        wait_for(partial(stage.has, holds))
        leave_and_be_gone(stage, sock, how, stage.is_idle)
    blockers = [stage.send(True, 4, max_tokens=240) for _ in range(8)]
    wait_for(lambda: len(stage.core.requests) == 8 and all(map(is_decoding, list(stage.core.requests.values()))))
    for stream, how in CASES:
        sock = stage.send(stream, 4, max_tokens=50)
        wait_for(lambda: len(stage.core.waiting) == 1)
        leave_and_be_gone(stage, sock, how, lambda: not len(stage.core.waiting))
    for sock in blockers:
        leave(sock, "close")
    wait_for(stage.is_idle, 5)
    num_left = 3 * len(CASES) + len(blockers)
    stage.gateway.wait_for(
        lambda: stage.gateway.metric("requests_aborted_total", reason="client_disconnect") == num_left
    )
    usages = stage.usages()
    assert {(u.reason, u.cause) for u in usages} == {(FinishReason.ABORT, "client_disconnect")}
    assert len(usages) == len({u.request_id for u in usages}) == num_left
    assert stage.pool.client.zcard(stage.pool.keys.windows) == 0


def test_leaving_ends_a_request_that_is_swapped_out(pool: Pool, gateway: RunningGateway) -> None:
    """The host pool has its blocks again, too."""
    stage = Stage(pool, gateway, pool.scheduler(preemption=Preemption.SWAP, enable_prefix_caching=False))
    stage.scheduler.start()
    pool.worker(step_s=0.02, num_blocks=64, num_cpu_blocks=64)
    gateway.wait_ready()
    for stream, how in CASES:
        older = stage.send(True, 120, max_tokens=130)
        wait_for(lambda: stage.has(is_decoding))
        sock = stage.send(stream, 100, max_tokens=130)
        wait_for(lambda: stage.has(lambda request: request.state is RequestState.SWAPPED))
        leave_and_be_gone(stage, sock, how, lambda: len(stage.core.requests) == 1)
        leave(older, "close")
        wait_for(stage.is_idle, 5)
        assert all(lane.pool.tier.num_free == 64 for lane in stage.core.lanes.values())
    gateway.wait_for(lambda: gateway.metric("requests_aborted_total", reason="client_disconnect") == 2 * len(CASES))
    assert len(stage.usages()) == 2 * len(CASES)


def leave_and_be_gone(stage: Stage, sock: socket.socket, how: str, is_gone: Callable[[], bool]) -> None:
    """Within two steps and a second."""
    left = time.monotonic()
    leave(sock, how)
    wait_for(is_gone, 5)
    assert time.monotonic() - left < 2 * 0.05 + 1 + SLACK_S


SLACK_S = 1.0
"""For a machine that is busy with other tests."""


@pytest.mark.timeout(120)
def test_clients_that_leave_at_random_leave_nothing_behind(stage: Stage) -> None:
    """BEST-08 in short: afterwards the pool is idle, and neither keys, tasks nor connections have become more."""
    stage.scheduler.start()
    stage.pool.worker(step_s=0.002, num_blocks=600)
    stage.gateway.wait_ready()
    rng = random.Random(3)
    server = stage.gateway.server.server_state
    before: set[Any] = set()
    for _ in range(4):
        clients = [(stage.send(bool(i % 2), rng.randint(1, 60), 30), time.monotonic()) for i in range(40)]
        while clients:
            sock, since = clients.pop(rng.randrange(len(clients)))
            time.sleep(max(0.0, since + rng.uniform(0, 0.3) - time.monotonic()))
            leave(sock, rng.choice(("close", "reset")))
        wait_for(stage.is_idle, 20)
        stage.gateway.wait_for(lambda: not server.tasks and len(server.connections) <= 1)
        before = before or kinds_of_keys(stage.pool)
    assert kinds_of_keys(stage.pool) == before
    usages = stage.usages()
    assert len(usages) == len({u.request_id for u in usages})
    aborted = sum(u.reason is FinishReason.ABORT for u in usages)
    assert aborted > 0, "nobody left early"
    assert all(u.num_output_tokens <= u.num_generated_tokens <= 30 for u in usages)
    assert stage.pool.client.zcard(stage.pool.keys.windows) == 0


def kinds_of_keys(pool: Pool) -> set[Any]:
    """All keys but the records, which have a time to live."""
    names: Any = pool.client.keys("*")
    return {name for name in names if b":request:" not in name and b":lease:" not in name}
