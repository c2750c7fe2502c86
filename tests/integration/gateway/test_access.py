"""Who may call: every path without a key, keys and tenants, quotas over all gateways, nothing told about keys."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from services.gateway.http.authentication import PUBLIC
from services.gateway.text.tokenizer import TextTokenizer
from shared.keys import Keys
from tests.fakes.byte_model import answer, spell
from tests.fakes.gateway_server import RunningGateway
from tests.fakes.scripted_pool import Script, ScriptedPool
from tests.fakes.sse_reader import parse_sse
from tests.integration.gateway.conftest import OpenScene, Scene
from tests.integration.gateway.test_process import gateway_process, wait_ready

ALICE, BOB = "pw-key-of-alice", "pw-key-of-bob"
OpenGuarded = Callable[..., Scene]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(open_scene: OpenScene, tmp_path: Path) -> OpenGuarded:
    """A gateway with keys for alice, with these limits, and bob."""

    def start(**alice: int) -> Scene:
        blocks = []
        for name, key, limits in (("alice", ALICE, alice), ("bob", BOB, {})):
            more = "".join(f"{limit} = {value}\n" for limit, value in limits.items())
            blocks.append(f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(key.encode()).hexdigest()}"\n{more}')
        file = tmp_path / "keys.toml"
        file.write_text("\n".join(blocks))
        return open_scene(api_key_file=file)

    return start


def test_every_route_needs_a_key_or_is_on_the_list(guarded: OpenGuarded) -> None:
    """Case 127."""
    scene = guarded()
    app = scene.gateway.server.app
    routes = {path: list(methods) for path, methods in app.openapi()["paths"].items()}
    routes |= {route.path: ["get", "head"] for route in app.routes if isinstance(route, Route)}
    assert len(routes) > 10 and set(routes) >= PUBLIC
    for path, methods in routes.items():
        for method in methods:
            status = scene.gateway.http.request(method, path).status_code
            assert (status == 401) == (path not in PUBLIC), (method, path, status)


def test_no_spelling_of_a_path_or_host_gets_around_it(guarded: OpenGuarded) -> None:
    """Case 126 (CVE-2026-48746): a slash or question mark in `Host` made the path another one."""
    scene = guarded()
    for target in (
        "/v1/models",
        "//v1/models",
        "/v1/../v1/models",
        "/V1/models",
        "/%2fv1/models",
        "/v1/models?x=/health/live",
        "/health/live/../../v1/models",
        "/health/live%00",
        "/health/live/",
        "http://x/v1/models",
        "/;/health/live",
    ):
        for host in ("x", "a/x?", "a/health?", "x/health/live?", "x#", ""):
            assert raw_status(scene, target, host) in (401, 400), (target, host)
    assert raw_status(scene, "/v1/models", "x", ALICE) == 200
    assert raw_status(scene, "/health/live", "a/x?") in (200, 400)


def raw_status(scene: Scene, target: str, host: str, key: str = "") -> int:
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    with socket.create_connection(("127.0.0.1", scene.gateway.settings.port), timeout=5) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nhost: {host}\r\n{authorization}connection: close\r\n\r\n".encode())
        return int(sock.recv(4096).split(b" ")[1])


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        f"Basic {ALICE}",
        ALICE,
        f"Bearer {ALICE}x",
        f"Bearer {ALICE} {ALICE}",
        "Bearer " + "x" * 4000,
    ],
)
def test_wrong_keys(guarded: OpenGuarded, value: str) -> None:
    scene = guarded()
    response = scene.gateway.http.get("/v1/models", headers={"Authorization": value})
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert scene.gateway.metric("request_errors_total", code="invalid_api_key") == 1
    twice = [("Authorization", f"Bearer {ALICE}"), ("Authorization", f"Bearer {ALICE}")]
    assert scene.gateway.http.get("/v1/models", headers=twice).status_code == 401


def test_a_key_says_whose_request_it_is(guarded: OpenGuarded) -> None:
    scene = guarded()
    http = scene.gateway.http
    made = http.post("/v1/completions", json={"prompt": "hi"}, headers={**bearer(ALICE), "X-Tenant": "bob"})
    request_id = made.json()["id"]
    assert scene.pool.submissions[request_id].tenant == "alice"
    assert http.get(f"/v1/requests/{request_id}", headers=bearer(ALICE)).status_code == 200
    assert http.get(f"/v1/requests/{request_id}", headers=bearer(BOB)).status_code == 404


def test_the_official_client_sends_its_key(open_scene: OpenScene) -> None:
    scene = open_scene(api_key="open-sesame")
    client = scene.gateway.openai()
    with pytest.raises(Exception, match="API key"):
        client.models.list()
    assert [m.id for m in client.with_options(api_key="open-sesame").models.list()] == ["bytes", "alias"]


def test_requests_at_a_time_are_counted_over_all_gateways(
    guarded: OpenGuarded, redis_url: str, byte_model: Path, byte_tokenizer: TextTokenizer
) -> None:
    scene = guarded(max_concurrent=2)
    scene.scripts["go"] = answer("text", hold_after=1)
    settings = {"api_key_file": scene.gateway.settings.api_key_file}
    other = RunningGateway(byte_tokenizer, model=byte_model, redis_url=redis_url, **settings)
    with ExitStack() as stack:
        stack.enter_context(other).wait_ready()
        body = {"prompt": "go", "stream": True}
        first, _ = [
            stack.enter_context(gateway.http.stream("POST", "/v1/completions", json=body, headers=bearer(ALICE)))
            for gateway in (scene.gateway, other)
        ]
        for gateway in (scene.gateway, other):
            response = gateway.http.post("/v1/completions", json=body, headers=bearer(ALICE))
            assert response.status_code == 429 and response.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(response.headers["retry-after"]) >= 1
        with other.http.stream("POST", "/v1/completions", json=body, headers=bearer(BOB)) as unlimited:
            assert unlimited.status_code == 200
            scene.pool.release()
            assert parse_sse(first.iter_lines()).is_done
        assert (
            scene.gateway.http.post("/v1/completions", json={"prompt": "go"}, headers=bearer(ALICE)).status_code == 200
        )


def test_one_after_another_is_never_too_many(guarded: OpenGuarded) -> None:
    scene = guarded(max_concurrent=1)
    for _ in range(30):
        response = scene.gateway.http.post("/v1/completions", json={"prompt": "hi"}, headers=bearer(ALICE))
        assert response.status_code == 200


def test_streams_over_one_request_are_limited_too(guarded: OpenGuarded) -> None:
    scene = guarded(max_concurrent=2)
    scene.scripts["go"] = answer("text", hold_after=1)
    http = scene.gateway.http
    with ExitStack() as stack:
        body = {"prompt": "go", "stream": True}
        first = stack.enter_context(http.stream("POST", "/v1/completions", json=body, headers=bearer(ALICE)))
        url = f"/v1/requests/{first.headers['x-request-id']}/stream"
        for _ in range(2):
            assert stack.enter_context(http.stream("GET", url, headers=bearer(ALICE))).status_code == 200
        refused = http.get(url, headers=bearer(ALICE))
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
        scene.pool.release()
    scene.gateway.wait_for(lambda: http.get(url, headers=bearer(ALICE)).status_code == 200)


def test_what_ended_after_its_gateway_died_does_not_count(guarded: OpenGuarded, keys: Keys) -> None:
    """Nobody took it out of the windows: it is still a member, as long as the gateway promised."""
    scene = guarded(max_concurrent=1)
    http, client = scene.gateway.http, scene.pool.client
    request_id = http.post("/v1/completions", json={"prompt": "go"}, headers=bearer(ALICE)).json()["id"]
    scene.gateway.wait_for(lambda: client.zcard(keys.windows) == 0)
    scene.gateway.wait_for(lambda: client.hexists(keys.request(request_id), "final"))  # after the client was told
    client.zadd(keys.windows, {request_id: (time.time() + 60) * 1000})
    client.sadd(keys.callers_responses("alice"), request_id)
    assert http.post("/v1/completions", json={"prompt": "go"}, headers=bearer(ALICE)).status_code == 200


def test_who_goes_on_at_another_gateway_after_a_death_pays_once(
    guarded: OpenGuarded, byte_model: Path, redis_url: str, keys: Keys
) -> None:
    """The first gateway sent no bill. Later streams over the same response change nothing."""
    scene = guarded(tokens_per_minute=600)
    scene.scripts["go"] = answer("x" * 200, hold_after=3)
    body, key_file = {"prompt": "go", "stream": True, "max_tokens": 250}, str(scene.gateway.settings.api_key_file)
    with gateway_process(byte_model, redis_url, api_key_file=key_file) as (process, url):
        wait_ready(url)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=bearer(ALICE)) as response:
            rest = f"/v1/requests/{response.headers['x-request-id']}/stream"
            process.kill()
    scene.pool.release()

    for _ in range(3):
        with scene.gateway.http.stream("GET", rest, headers=bearer(ALICE)) as again:
            assert parse_sse(again.iter_lines()).is_done
    flushing = scene.gateway.state.engine.intake.flush()
    asyncio.run_coroutine_threadsafe(flushing, scene.gateway.loop).result(5)
    milliseconds: Any = scene.pool.client.pttl(keys.bucket("alice"))
    assert 17_000 < milliseconds < 20_400  # 203 tokens, at 10 tokens/s


def test_tokens_per_minute(guarded: OpenGuarded) -> None:
    """A bucket of one minute: what was generated counts as well as what was sent, and it fills again."""
    scene = guarded(tokens_per_minute=600)
    scene.scripts["go"] = Script(spell("x" * 400))

    def post(**body: Any) -> httpx.Response:
        return scene.gateway.http.post("/v1/completions", json={"prompt": "go", **body}, headers=bearer(ALICE))

    assert post(max_tokens=400).status_code == 200
    assert post(max_tokens=300).status_code == 200  # accepted while anything is left: now it is overdrawn
    refused = post()
    assert refused.status_code == 429
    wait_s = int(refused.headers["retry-after"])
    assert 9 <= wait_s <= 12  # 704 of 600 tokens, at 10 tokens/s
    assert scene.gateway.http.post("/v1/completions", json={"prompt": "go"}, headers=bearer(BOB)).status_code == 200


def test_no_key_is_told_to_anybody(guarded: OpenGuarded, caplog: pytest.LogCaptureFixture) -> None:
    """Case 132: responses, metrics, logs and Redis hold neither key nor address."""
    scene = guarded(max_concurrent=2, tokens_per_minute=10**6)
    http = scene.gateway.http
    texts = [
        http.get(path, headers=bearer(ALICE)).text
        for path in ("/health", "/metrics", "/v1/models", "/openapi.json", "/v1/requests", "/nowhere")
    ]
    texts.append(http.post("/v1/completions", json={"prompt": 1}, headers=bearer(ALICE)).text)
    texts.append(http.post("/v1/completions", json={"prompt": "hi"}, headers=bearer(ALICE)).text)
    time.sleep(0.1)
    keys = scene.pool.client.keys("*")
    texts += [caplog.text, repr(scene.gateway.settings), repr(keys)]
    for text in texts:
        assert ALICE not in text and "0x7f" not in text


def test_no_check_is_an_assert(byte_model: Path, redis_url: str, keys: Keys) -> None:
    """Case 134 (CVE-2026-41523): `python -O` removes asserts."""
    with (
        ScriptedPool(redis_url, keys, lambda _: answer("text")),
        gateway_process(byte_model, redis_url, flags=("-O",), api_key="open-sesame") as (_, url),
        httpx.Client(base_url=url, trust_env=False, timeout=20) as http,
    ):
        wait_ready(url)
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("DELETE", "/v1/requests/x")):
            assert http.request(method, path).status_code == 401
        http.headers["Authorization"] = "Bearer open-sesame"
        made = http.post("/v1/completions", json={"prompt": "go"})
        assert made.status_code == 200 and made.json()["choices"][0]["text"] == "text"
        stream = f"/v1/requests/{made.json()['id']}/stream"
        assert http.get(stream, headers={"Last-Event-ID": "1,1"}).status_code == 400
        assert http.get(stream).text.endswith("[DONE]\n\n")
        for poison in ({"prompt": ""}, {"prompt": [-1]}, {"prompt": [10**9]}, {"prompt": "x", "n": 10**9}):
            assert http.post("/v1/completions", json=poison).status_code == 400
        assert http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Resume-Window": "0"}).status_code == 400
