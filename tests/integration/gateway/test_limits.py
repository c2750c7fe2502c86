"""Too much of anything is refused at once, and what was accepted goes on (cases 87 to 94, 130)."""

import asyncio
import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from services.gateway import state
from services.gateway.http import body as body_module
from services.gateway.http import connection, routes, turnstile
from services.gateway.http.connection import BoundedProtocol
from services.gateway.http.context import DRAWN
from services.gateway.http.turnstile import GENERATIONS, PLACES
from services.gateway.requests.submissions import build_submissions
from services.gateway.text.tokenizer import TextTokenizer
from shared.messages import Abort, Submission
from tests.fakes.byte_model import answer, spell
from tests.fakes.gateway_server import RunningGateway
from tests.fakes.scripted_pool import Script
from tests.fakes.sse_reader import parse_sse
from tests.integration.gateway.conftest import OpenScene, Scene
from tests.integration.gateway.test_bad_requests import check_error


@pytest.fixture
def sock(scene: Scene) -> Iterator[socket.socket]:
    with closing(socket.create_connection(("127.0.0.1", scene.gateway.settings.port), timeout=10)) as made:
        yield made


def status_of(sock: socket.socket) -> int:
    return int(sock.recv(65536).split(b" ")[1])


# ---------------------------------------------------------------- the queue


@dataclass
class Flood:
    """Streams that are asked for at the same time."""

    refused: list[tuple[int, str]] = field(default_factory=list)
    """(status, retry-after)."""
    num_done: int = 0

    async def post(self, client: httpx.AsyncClient, most_refused: int, on_refused: Callable[[], None]) -> None:
        async with client.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as response:
            if response.status_code == 200:
                await response.aread()
                self.num_done += 1
                return
            self.refused.append((response.status_code, response.headers["retry-after"]))
            if len(self.refused) == most_refused:
                on_refused()

    async def run(self, url: str, count: int, most_refused: int, on_refused: Callable[[], None]) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self.post(client, most_refused, on_refused) for _ in range(count)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("short_body", [state.SHORT_BODY, 0], ids=["in the event loop", "in the text threads"])
def test_a_flood_is_refused_before_its_texts_are_read(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch, short_body: int
) -> None:
    """Of 200 that come at once, 150 too many. To read them all took longer than everything else that is to be done for
    the first refusal."""
    num_read = 0

    def build(*args: Any, **options: Any) -> list[Submission]:
        nonlocal num_read
        num_read += 1
        return build_submissions(*args, **options)

    scene = open_scene(pool_cap_requests=50)
    scene.pool.pause()
    monkeypatch.setattr(routes, "build_submissions", build)
    monkeypatch.setattr(state, "SHORT_BODY", short_body)
    asyncio.run(Flood().run(scene.gateway.url, 200, 150, scene.pool.resume))
    assert 50 <= num_read < 120


@pytest.mark.timeout(60)
def test_beyond_the_cap_exactly_the_rest_is_refused(open_scene: OpenScene) -> None:
    """Admission held, cap 50, 200 sent at once: 150 times 429, before any of the 50 is answered; these all are."""
    scene = open_scene(pool_cap_requests=50)
    scene.post("/v1/completions", prompt="warm")
    scene.pool.pause()

    flood = Flood()
    asyncio.run(flood.run(scene.gateway.url, 200, 150, scene.pool.resume))
    refused = flood.refused
    assert flood.num_done == 50
    assert len(refused) == 150 and {status for status, _ in refused} == {429}
    assert all(int(retry_after) >= 1 for _, retry_after in refused)
    assert len(scene.pool.submissions) == 51
    assert scene.post("/v1/completions", prompt="next").status_code == 200  # case 88: it recovers


@pytest.mark.timeout(60)
def test_of_two_gateways_on_one_full_queue_each_request_is_answered(
    open_scene: OpenScene, redis_url: str, byte_model: Path, byte_tokenizer: TextTokenizer
) -> None:
    """Case 89: with two front ends some requests hung for ever although all counters were 0."""
    scene, flood = open_scene(pool_cap_requests=20), Flood()
    scene.pool.pause()
    other = RunningGateway(byte_tokenizer, model=byte_model, redis_url=redis_url)

    async def both() -> None:
        urls = (scene.gateway.url, other.url)
        await asyncio.gather(*(flood.run(url, 60, 100, scene.pool.resume) for url in urls))

    with other:
        other.wait_ready()
        asyncio.run(both())
    assert (flood.num_done, len(flood.refused)) == (20, 100)


def test_what_a_full_queue_refuses_is_told_and_counted_as_any_other(open_scene: OpenScene) -> None:
    """Also before it is routed. What is there already is answered."""
    scene = open_scene(pool_cap_requests=1)
    scene.pool.pause()
    body, key = {"prompt": "go", "stream": True}, {"Idempotency-Key": "k"}
    with scene.gateway.http.stream("POST", "/v1/completions", json=body, headers=key) as first:
        refused = [scene.post("/v1/completions", prompt="x") for _ in range(20)]
        for response in refused:
            assert check_error(response, 429)["code"] == "queue_full" and int(response.headers["retry-after"]) >= 1
        assert len({response.headers["x-request-id"] for response in refused}) == 20
        assert scene.gateway.metric("request_errors_total", code="queue_full") == 20
        assert scene.gateway.http.get("/v1/models").status_code == 200
        scene.gateway.state.engine.intake._full_until = math.inf
        posts = {r.path for r in routes.router.routes if isinstance(r, APIRoute) and "POST" in (r.methods or ())}
        assert posts == GENERATIONS
        for path in GENERATIONS:  # not even routed
            unread = scene.post(path, no_such_field=1)
            assert check_error(unread, 429)["code"] == "queue_full" and unread.headers["x-request-id"].startswith(DRAWN)
        with scene.gateway.http.stream("POST", "/v1/completions", json=body, headers=key) as again:
            assert again.status_code == 200 and again.headers["x-request-id"] == first.headers["x-request-id"]
        scene.pool.resume()


@pytest.mark.parametrize("start", [b"content-length: 1000\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"])
def test_slow_bodies_hold_nobody_up(scene: Scene, monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """More of them than there are places in the turnstile, which are not left by time here."""
    monkeypatch.setattr(turnstile, "HELD_S", 3600.0)
    address = ("127.0.0.1", scene.gateway.settings.port)
    with ExitStack() as stack:
        for _ in range(3 * PLACES):
            slow = stack.enter_context(closing(socket.create_connection(address, timeout=10)))
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + start)
        scene.gateway.wait_for(lambda: len(scene.gateway.server.server_state.tasks) >= 3 * PLACES)
        assert scene.post("/v1/completions", prompt="neighbour").status_code == 200


def test_one_refusal_is_fast(open_scene: OpenScene) -> None:
    scene = open_scene(pool_cap_requests=1)
    scene.pool.pause()
    with scene.gateway.http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}):
        times = []
        for _ in range(20):
            started = time.monotonic()
            response = scene.post("/v1/completions", prompt="x" * 400)
            times.append(time.monotonic() - started)
            assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
        assert sorted(times)[10] < 0.2, times
        scene.pool.resume()


def test_a_full_redis_takes_no_new_work_and_finishes_the_old(scene: Scene) -> None:
    """Case 115."""
    scene.scripts["go"] = answer("to the very end", hold_after=3)
    redis = scene.pool.client
    for i in range(400):  # so that a few buffers more or less do not matter
        redis.hset("ballast", str(i), "x" * 100_000)
    used = int(redis.info("memory")["used_memory"])
    try:
        with scene.gateway.http.stream("POST", "/v1/completions", json={"prompt": "go", "stream": True}) as response:
            redis.config_set("maxmemory", int(used * 1.2))
            scene.gateway.wait_for(lambda: scene.post("/v1/completions", prompt="new").status_code == 429)
            refused = scene.post("/v1/completions", prompt="new")
            assert refused.json()["error"]["code"] == "memory_full" and int(refused.headers["retry-after"]) >= 1
            scene.pool.release()
            assert parse_sse(response.iter_lines()).text() == "to the very end"
    finally:
        redis.config_set("maxmemory", 0)
        redis.delete("ballast")
    scene.gateway.wait_for(lambda: scene.post("/v1/completions", prompt="new").status_code == 200)


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(("path", "status"), [("completions", 429), ("nothing", 404)])
def test_an_answer_before_the_body_was_asked_for_is_the_connections_last(
    scene: Scene, sock: socket.socket, path: str, status: int
) -> None:
    """The client need not send its body then: what it sends next must not be taken for it."""
    scene.gateway.state.engine.intake._full_until = math.inf
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n"
    sock.sendall(head.encode())
    with sock.makefile("rb") as answer:
        whole = answer.read()
    assert whole.startswith(f"HTTP/1.1 {status} ".encode()) and b"\r\nconnection: close\r\n" in whole


def test_a_body_is_asked_for_and_the_connection_stays(scene: Scene, sock: socket.socket) -> None:
    body, once = b'{"prompt": "x"}', b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
    for _ in range(2):
        sock.sendall(once + b"content-length: %d\r\n\r\n" % len(body))
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert status_of(sock) == 200


def test_large_headers_are_431(scene: Scene, sock: socket.socket) -> None:
    sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-large: " + b"x" * 1_000_000)
    assert status_of(sock) == 431
    assert scene.gateway.http.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: y\r\n" % i for i in range(9000)) + b"\r\n",
        b"GET /v1/models?" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
    ids=["many", "path", "complete"],
)
def test_large_heads_of_every_kind_are_431(scene: Scene, sock: socket.socket, head: bytes) -> None:
    sock.sendall(head)
    assert status_of(sock) == 431


def test_heads_that_fit_are_no_problem(scene: Scene) -> None:
    headers = {f"x-{i}": "y" * 1000 for i in range(50)}
    for _ in range(3):  # one connection: the count begins anew
        assert scene.gateway.http.get("/v1/models", headers=headers).status_code == 200
    body = {"prompt": "x" * 300, "user": "u" * 200_000}
    assert scene.gateway.http.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_a_head_that_dribbles_is_cut(scene: Scene, sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slowloris."""
    monkeypatch.setattr(connection, "HEAD_S", 0.3)
    with closing(socket.create_connection(("127.0.0.1", scene.gateway.settings.port), timeout=10)) as slow:
        slow.sendall(b"GET /v1/models HTTP/1.1\r\nhost:")
        started = time.monotonic()
        with suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        assert time.monotonic() - started < 3


def test_a_body_that_dribbles_is_408(scene: Scene, sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_S", 0.3)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    assert status_of(sock) == 408


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"prompt": ' + "[" * 100_000, '{"a":' * 50_000])
def test_deep_json_is_400(scene: Scene, deep: str) -> None:
    response = scene.gateway.http.post("/v1/completions", content=deep)
    assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_json"


# ---------------------------------------------------------------- slow readers


def open_stream(sock: socket.socket, **body: Any) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    data = json.dumps({"prompt": "go", "stream": True, "user": "u"} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)


def test_a_client_that_does_not_read_holds_nothing_up(open_scene: OpenScene) -> None:
    """Case 93: what waits is bounded by the request's own tokens; the client is given up."""
    scene = open_scene(write_timeout_s=1.0, pool_step_s=0.0005)
    tokens = spell("x" * 60) * 8
    scene.scripts["go"] = Script(tokens, end=None)
    scene.scripts["fill"] = answer("x" * 480)
    prompts = ["go"] * 100  # 48,000 events of 200 bytes: far more than socket and transport hold
    with closing(socket.create_connection(("127.0.0.1", scene.gateway.settings.port))) as stuck:
        open_stream(stuck, prompt=prompts, max_tokens=len(tokens))
        scene.pool.wait_for(lambda: len(scene.pool.submissions) == 100)
        assert scene.post("/v1/completions", prompt="neighbour").status_code == 200
        scene.gateway.wait_for(lambda: scene.gateway.metric("requests_aborted_total", reason="slow_client") == 1, 30)
    scene.pool.wait_for(lambda: scene.pool.messages(Abort) or not scene.gateway.state.engine.reader.num_live)
    scene.gateway.wait_for(lambda: scene.gateway.state.engine.reader.num_live == 0)
    server = scene.gateway.server.server_state
    scene.gateway.wait_for(lambda: not server.tasks and len(server.connections) <= 1)


def keep_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel would hold of an answer for a client that does not read, megabytes here, stays in the process."""
    made = BoundedProtocol.connection_made

    def connection_made(self: BoundedProtocol, transport: Any) -> None:
        with closing(transport.get_extra_info("socket").dup()) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(BoundedProtocol, "connection_made", connection_made)


def open_whole_answer(scene: Scene, sock: socket.socket) -> None:
    """Of 100 kB, with nothing read of it yet: in JSON a control character has six of them."""
    scene.scripts["go"] = answer("\x01" * 70)
    open_stream(sock, prompt=["go"] * 100, n=2, max_tokens=100, stream=False)
    # the text is there, and the answer written as far as it goes
    scene.gateway.wait_for(lambda: scene.gateway.metric("request_success_total", finished_reason="stop") == 200, 60)


def test_a_whole_answer_that_nobody_takes_holds_no_connection(
    open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 93 again: nobody waits for the rest of an answer that was written at once, and a connection that is closed
    in order stays until all was taken."""
    keep_little(monkeypatch)
    scene = open_scene(write_timeout_s=0.5)
    connections = scene.gateway.server.server_state.connections
    with closing(socket.create_connection(("127.0.0.1", scene.gateway.settings.port))) as stuck:
        open_whole_answer(scene, stuck)
        (full,) = scene.gateway.wait_for(lambda: [c for c in list(connections) if is_full(c)])
        scene.gateway.wait_for(lambda: full not in connections)


def is_full(protocol: Any) -> bool:
    """Whether much of an answer waits in the process."""
    return bool(protocol.transport.get_write_buffer_size() > 2 * connection.LEAST_TAKEN)


def test_who_reads_slowly_but_reads_gets_all(open_scene: OpenScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five times as fast as it must."""
    keep_little(monkeypatch)
    scene = open_scene(write_timeout_s=2.0)
    with closing(socket.create_connection(("127.0.0.1", scene.gateway.settings.port), timeout=10)) as slow:
        open_whole_answer(scene, slow)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)  # a tiny window alone is slow
        received, due, started = b"", 10_000, time.monotonic()
        while not received.endswith(b"}"):
            part = slow.recv(due - len(received))
            assert part, "it was cut"
            received += part
            if len(received) == due:
                time.sleep(0.25)
                due += 10_000
        assert time.monotonic() - started > 2.0
    assert len(json.loads(received.partition(b"\r\n\r\n")[2])["choices"]) == 200


def test_bodies_of_many_requests_share_what_memory_there_is_for_them(open_scene: OpenScene) -> None:
    scene = open_scene(max_bodies_bytes=100_000)
    slow = socket.create_connection(("127.0.0.1", scene.gateway.settings.port), timeout=10)
    with closing(slow):
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 95000\r\n\r\n" + b" " * 90_000)
        scene.gateway.wait_for(lambda: scene.gateway.state.body_room.taken == 90_000)
        refused = scene.post("/v1/completions", prompt="x", user="u" * 20_000)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert scene.text_of("small") == "OK: small"
    scene.gateway.wait_for(lambda: scene.gateway.state.body_room.taken == 0)
    assert scene.post("/v1/completions", prompt="x", user="u" * 20_000).status_code == 200
