"""A client that leaves ends its request, streaming or not, whatever the request was doing (BEST-06, gateway's part)."""

import json
import socket
import time
from typing import Any

import pytest

from shared.messages import Abort
from tests.fakes.byte_model import spell
from tests.fakes.scripted_pool import Script
from tests.integration.gateway.conftest import Scene


def send_request(scene: Scene, body: dict[str, Any]) -> socket.socket:
    """POST over a raw socket, so that it can be closed at any moment."""
    data = json.dumps({"model": "bytes", **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", scene.gateway.settings.port))
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("state", ["waiting", "decoding"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_leaving_aborts(scene: Scene, stream: bool, state: str, how: str) -> None:
    scene.scripts["go"] = Script(spell("some text") * 1000, end=None, hold_after=0 if state == "waiting" else 5)
    sock = send_request(scene, {"prompt": "go", "stream": stream})
    (request_id,) = scene.pool.wait_for(lambda: list(scene.pool.submissions))
    reader = scene.gateway.state.engine.reader
    expected = 0 if state == "waiting" else 5
    scene.gateway.wait_for(lambda: [c.committed for c in reader.channels] == [expected])
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    sock.close()
    abort = scene.pool.wait_for(lambda: scene.pool.messages(Abort), timeout_s=1.0)[0]
    assert abort == Abort(request_id, "client_disconnect")
    assert scene.gateway.metric("requests_aborted_total", reason="client_disconnect") == 1
    assert reader.num_live == 0
    assert scene.gateway.metric("gateway_live_requests") == 0


def test_every_prompt_of_a_request_is_aborted(scene: Scene) -> None:
    scene.scripts["go"] = Script(spell("x"), end=None)
    sock = send_request(scene, {"prompt": ["go 1", "go 2", "go 3"], "stream": True})
    scene.pool.wait_for(lambda: len(scene.pool.submissions) == 3)
    sock.close()
    aborts = scene.pool.wait_for(lambda: len(found := scene.pool.messages(Abort)) == 3 and found)
    assert {a.request_id for a in aborts} == set(scene.pool.submissions)
    assert scene.gateway.metric("requests_aborted_total", reason="client_disconnect") == 1


def test_leaving_after_the_end_aborts_nothing(scene: Scene) -> None:
    sock = send_request(scene, {"prompt": "abc"})
    received = b""
    while b'"usage"' not in received:
        received += sock.recv(65536)
    sock.close()
    assert scene.post("/v1/completions", model="bytes", prompt="more").status_code == 200
    assert scene.pool.messages(Abort) == []


def test_a_client_that_leaves_mid_body_queues_nothing(scene: Scene) -> None:
    sock = socket.create_connection(("127.0.0.1", scene.gateway.settings.port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    time.sleep(0.05)
    sock.close()
    assert scene.post("/v1/completions", model="bytes", prompt="next").status_code == 200
    assert len(scene.pool.intake) == 1


def test_many_disconnects_leave_no_task_behind(scene: Scene) -> None:
    """Case 94."""
    scene.scripts["go"] = Script(spell("x") * 100, end=None)
    server = scene.gateway.server.server_state
    for i in range(40):
        sock = send_request(scene, {"prompt": "go", "stream": bool(i % 2)})
        time.sleep(0.002 * (i % 7))
        sock.close()
    # the connection that is left is that of the test's own client
    scene.gateway.wait_for(lambda: not server.tasks and len(server.connections) <= 1)
    reader = scene.gateway.state.engine.reader
    assert reader.num_live == 0
    # every request that was queued is aborted, those whose client had left before were not queued
    scene.pool.wait_for(lambda: {a.request_id for a in scene.pool.messages(Abort)} >= set(scene.pool.submissions))
