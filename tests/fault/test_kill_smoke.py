"""kill -9 of a worker, the scheduler or a gateway during a stream: the text is the one it would have had, once.

A smoke test; the fault matrix is another suite.
"""

import json
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from services.cli.resuming import ResumingStream
from tests.harness.stack import Stack

OUTPUT_TOKENS = 64
pytestmark = [pytest.mark.model]


def stream(stack: Stack, body: dict[str, object], on_token: Callable[[int], None]) -> tuple[str, dict[str, object]]:
    """Text and last usage of a stream; `on_token` is called with the number of deltas so far. Asserts the ending."""
    text, reasons, ids, done, count = "", [], set(), 0, 0
    usage: dict[str, object] = {}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                ids.add(event["id"])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice["text"]
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                    if choice["text"]:
                        count += 1
                        on_token(count)
    assert (reasons, done, len(ids)) == (["length"], 1, 1)
    return text, usage


@pytest.mark.parametrize(("victim", "temperature"), [("gpu_worker", 0), ("gpu_worker", 0.9), ("scheduler", 0.9)])
@pytest.mark.timeout(180)
def test_the_stream_goes_on_to_exactly_its_text(float_stack: Stack, victim: str, temperature: float) -> None:
    body = {
        "model": float_stack.model,
        "prompt": "The river began in the mountains and",
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": 7,
    }
    reference, usage = stream(float_stack, body, lambda _: None)
    assert usage["completion_tokens"] == OUTPUT_TOKENS
    before = float_stack.pids()[victim]

    def kill(count: int) -> None:
        if count == 20:
            os.kill(before[0], signal.SIGKILL)

    text, usage = stream(float_stack, body, kill)
    after = float_stack.wait_pids(victim)
    assert before[0] not in after and len(after) == len(before)  # it was killed, and came back
    assert text == reference
    assert usage["completion_tokens"] == OUTPUT_TOKENS
    float_stack.wait_idle()


@pytest.mark.timeout(120)
def test_a_stream_goes_on_at_another_gateway(float_stack: Stack) -> None:
    body = {
        "model": float_stack.model,
        "prompt": "The river began in the mountains and",
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": 7,
        "stream_options": {"include_usage": True},
    }
    reference, usage = stream(float_stack, body, lambda _: None)
    before = float_stack.pids()["gateway"]
    resuming = ResumingStream(float_stack.gateway_urls(), "/v1/completions", body)
    chunks: list[dict[str, Any]] = []
    for chunk in resuming:
        chunks.append(chunk)
        if len(chunks) == 20:
            os.kill(before[0], signal.SIGKILL)
    assert resuming.num_resumed >= 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == reference
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert [chunk["usage"] for chunk in chunks if chunk["usage"]] == [usage | {"prompt_tokens_details": ANY}]
    float_stack.wait_idle()
    path = f"{float_stack.url}/v1/requests/{resuming.request_id}"
    assert httpx.get(path).json()["finish_reasons"] == ["length"]
    check_every_cut(f"{path}/stream", reference)


def check_every_cut(url: str, reference: str) -> None:
    """After the end, from behind each token: what follows is the rest."""
    rests = []
    for count in range(OUTPUT_TOKENS):
        lines = httpx.get(url, headers={"Last-Event-ID": str(count)}, timeout=30).text.splitlines()
        assert lines[-2] == "data: [DONE]"
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        rests.append("".join(choice["text"] for event in events for choice in event["choices"]))
    assert rests[0] == reference and all(reference.endswith(rest) for rest in rests)
    assert [len(rest) for rest in rests] == sorted((len(rest) for rest in rests), reverse=True)
    assert len(set(rests)) > OUTPUT_TOKENS // 2
