"""BEST-05 and BEST-17 over HTTP: a bad request gets a 4xx that names the field, is never queued, and harms nobody."""

import json
import threading
from typing import Any

import httpx
import pytest

from services.gateway.requests.fields import MAX_PROMPTS
from shared.messages import Submit
from tests.fakes.byte_model import MAX_MODEL_LEN, VOCAB_SIZE, answer
from tests.fakes.sse_reader import SseStream
from tests.integration.gateway.conftest import OpenScene, Scene

GOOD = {"model": "bytes", "prompt": "hello"}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "hello"}]}

POISON: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [""]}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": [VOCAB_SIZE]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [2**70]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": ["a"] * (MAX_PROMPTS + 1)}),
    ("prompt", {"prompt": "x" * MAX_MODEL_LEN}),
    ("logit_bias", {"logit_bias": {str(VOCAB_SIZE): 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"a": 1}}),
    ("stop", {"stop": ["x"] * 100_000}),
    ("stop", {"stop": [""]}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
    ("guided_regex", {"guided_regex": "(a+"}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}),
    ("max_tokens", {"max_tokens": "many"}),
    ("max_tokens", {"max_tokens": MAX_MODEL_LEN}),
    ("max_tokesn", {"max_tokesn": 5}),
]

RANGES: list[tuple[str, Any, bool]] = [
    ("temperature", -0.1, False), ("temperature", 2.1, False), ("temperature", 1e-9, True), ("temperature", 0, True),
    ("top_p", 0, False), ("top_p", 1.0001, False), ("top_k", 0, True), ("top_k", -1, True), ("top_k", -2, False),
    ("top_k", 10**9, True), ("min_p", -0.1, False), ("min_p", 1.1, False), ("presence_penalty", 2.1, False),
    ("presence_penalty", -2.1, False), ("frequency_penalty", 2.1, False), ("frequency_penalty", -2.1, False),
    ("repetition_penalty", 0, False), ("n", 0, False), ("n", -1, False), ("n", 10**9, False), ("best_of", 0, False),
    ("best_of", 10**9, False), ("max_tokens", 0, False), ("max_tokens", -1, False), ("max_tokens", 2**31, False),
    ("max_tokens", 2**63, False), ("max_tokens", 10**30, False), ("max_tokens", None, True), ("min_tokens", -1, False),
    ("min_tokens", MAX_MODEL_LEN, False), ("logprobs", 21, False), ("logprobs", 10**6, False), ("stop", [], True),
    ("seed", -1, False), ("seed", 2**64, False), ("seed", 0, True), ("n", 1, True),
]  # fmt: skip

BROKEN_BODIES: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("not json", b"{model: bytes}"),
    ("cut", b'{"model": "bytes"'),
    ("no object", b'["bytes"]'),
    ("deep", b"[" * 100_000),
    ("deep in a field", b'{"model": "bytes", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("nan", b'{"model": "bytes", "prompt": "x", "temperature": NaN}'),
    ("infinity", b'{"model": "bytes", "prompt": "x", "temperature": -Infinity}'),
    ("overflow", b'{"model": "bytes", "prompt": "x", "temperature": 1e999}'),
    ("lone surrogate", b'{"model": "bytes", "prompt": "\\ud800"}'),
    ("surrogates of a pair, swapped", b'{"model": "bytes", "prompt": "\\udc00\\ud800 x"}'),
    ("bad utf-8", b'{"model": "bytes", "prompt": "\xff\xfe"}'),
    ("surrogate as utf-8", b'{"model": "bytes", "prompt": "\xed\xa0\x80"}'),
    ("ill-formed key", b'{"model": "bytes", "\xc3": 1}'),
    ("long integer", b'{"model": "bytes", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}"),
]


def check_error(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error in OpenAI's shape, and nothing else."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


def test_poison_harms_no_neighbour(open_scene: OpenScene) -> None:
    scene = open_scene(pool_step_s=0.02)
    texts = {f"stream {i}": f"this is the undisturbed text of stream number {i}" for i in range(4)}
    for name, text in texts.items():
        scene.scripts[name] = answer(text)
    results: dict[str, SseStream] = {}

    def run(name: str) -> None:
        results[name] = scene.stream("/v1/completions", model="bytes", prompt=name)

    threads = [threading.Thread(target=run, args=(name,)) for name in texts]
    for thread in threads:
        thread.start()
    scene.pool.wait_for(lambda: len(scene.pool.submissions) == 4)
    for param, fields in POISON:
        error = check_error(scene.post("/v1/completions", **{**GOOD, **fields}))
        assert (error["param"] or "").startswith(param), (param, error)
        assert param in error["message"]
    assert any(t.is_alive() for t in threads), "the poison was meant to meet running streams"
    for thread in threads:
        thread.join()
    assert {name: s.text() for name, s in results.items()} == texts
    assert len(scene.pool.messages(Submit)) == 4


def test_ranges_are_documented_answers(scene: Scene) -> None:
    for name, value, is_good in RANGES:
        response = scene.post("/v1/completions", **{**GOOD, name: value})
        if is_good:
            assert response.status_code == 200, (name, value, response.text)
        else:
            assert name in check_error(response)["message"], (name, value)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_broken_bodies_are_400(scene: Scene, path: str) -> None:
    headers = {"content-type": "application/json"}
    for name, body in BROKEN_BODIES:
        response = scene.gateway.http.post(path, content=body, headers=headers)
        assert "\ufffd" not in response.text, name
        check_error(response)
    assert scene.pool.intake == []


def test_the_context_is_exact_and_both_numbers_are_told(scene: Scene) -> None:
    prompts = ["x" * (MAX_MODEL_LEN + d) for d in (-1, 0, 1)]
    answers = [scene.post("/v1/completions", model="bytes", prompt=prompt, max_tokens=1) for prompt in prompts]
    assert answers[0].status_code == 200
    for response in answers[1:]:
        assert str(MAX_MODEL_LEN) in check_error(response)["message"]
    over = scene.post("/v1/completions", model="bytes", prompt="x" * 500, max_tokens=13)
    assert check_error(over)["code"] == "context_length_exceeded"
    assert "513" in over.text and "512" in over.text


def test_unknown_names_and_methods(scene: Scene) -> None:
    error = check_error(scene.post("/v1/chat/completions", **{**CHAT, "model": "gpt-9"}), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    http = scene.gateway.http
    assert check_error(http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert check_error(http.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    assert check_error(http.post("/v1/models", json={}), 405)
    assert check_error(http.post("//v1//completions", json=GOOD), 404)
    assert scene.pool.intake == []


def test_large_bodies_are_413_before_they_are_parsed(open_scene: OpenScene) -> None:
    scene = open_scene(max_body_bytes=10_000)
    http = scene.gateway.http
    big = json.dumps({**GOOD, "prompt": "x" * 20_000}).encode()
    assert check_error(http.post("/v1/completions", content=big), 413)["code"] == "request_too_large"
    pieces = (big[i : i + 1000] for i in range(0, len(big), 1000))
    assert check_error(http.post("/v1/completions", content=pieces), 413)
    assert check_error(http.post("/v1/completions", content=b"[" * 15_000), 413)
    assert scene.post("/v1/completions", **GOOD).status_code == 200


def test_errors_reach_browsers(open_scene: OpenScene) -> None:
    scene = open_scene(cors_origins=("https://chat.example",))
    headers = {"origin": "https://chat.example"}
    response = scene.gateway.http.post("/v1/completions", json={}, headers=headers)
    check_error(response)
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    preflight = {**headers, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert scene.gateway.http.options("/v1/chat/completions", headers=preflight).status_code == 200


def test_prompts_are_not_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    canary = "canary-7f3a"
    with caplog.at_level("DEBUG"):
        scene.post("/v1/completions", model="bytes", prompt=canary)
        scene.post("/v1/completions", model="bytes", prompt=canary, temperature=7)
        scene.post("/v1/completions", model="bytes", prompt=[canary, 1])
    assert canary not in caplog.text
    assert canary not in scene.gateway.http.get("/metrics").text
