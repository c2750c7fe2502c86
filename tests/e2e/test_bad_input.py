"""BEST-05 on the real stack: poison meets running streams; the streams' texts and the processes stay the same."""

import asyncio
import json

import httpx
import pytest

from tests.harness.stack import Stack

pytestmark = [pytest.mark.model]
STREAMS = 4
POISON: list[tuple[str, dict[str, object]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [""]}),
    ("prompt", {"prompt": [49152]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": "word " * 20_000}),
    ("logit_bias", {"logit_bias": {"49152": 1}}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 2**63}),
    ("temperature", {"temperature": -0.1}),
    ("n", {"n": 10**9}),
    ("guided_regex", {"guided_regex": "(a+"}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}),
    ("stop", {"stop": ["x"] * 1_000_000}),
]


async def _text(client: httpx.AsyncClient, model: str, index: int, started: asyncio.Event) -> str:
    body = {"model": model, "prompt": f"Chapter {index}. The ship", "max_tokens": 96, "ignore_eos": True}
    text = ""
    async with client.stream("POST", "/v1/completions", json={**body, "temperature": 0, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                started.set()
    return text


async def _run(stack: Stack, poison: bool) -> list[str]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as client:
        started = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(_text(client, stack.model, i, started[i])) for i in range(STREAMS)]
        for event in started:
            await event.wait()
        for param, fields in POISON if poison else []:
            body = {"model": stack.model, "prompt": "x", **fields}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 400, (param, answer.status_code, answer.text[:200])
            assert param in answer.json()["error"]["message"], answer.text[:300]
        assert not all(stream.done() for stream in streams), "the poison was meant to meet running streams"
        return await asyncio.gather(*streams)


@pytest.mark.timeout(240)
def test_poison_harms_no_stream_and_no_process(float_stack: Stack) -> None:
    pids = float_stack.pids()
    undisturbed = asyncio.run(_run(float_stack, poison=False))
    assert asyncio.run(_run(float_stack, poison=True)) == undisturbed
    assert float_stack.pids() == pids
    float_stack.wait_idle()
