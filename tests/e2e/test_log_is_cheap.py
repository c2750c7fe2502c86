"""The log costs one plan and one result per step, whatever the number of streams: counted by Redis itself."""

import asyncio

import httpx
import pytest

from shared.redis_client import connect
from tests.harness.stack import Stack

REQUESTS = 32
OUTPUT_TOKENS = 64
pytestmark = [pytest.mark.model]


def _calls(info: dict[str, dict[str, int]]) -> dict[str, int]:
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in info.items()}


async def _run(stack: Stack) -> None:
    async def one(client: httpx.AsyncClient, index: int) -> None:
        body = {"model": stack.model, "prompt": f"Story {index}: once upon a time", "max_tokens": OUTPUT_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            assert [line async for line in answer.aiter_lines() if line.startswith("data:")][-1] == "data: [DONE]"

    async with httpx.AsyncClient(base_url=stack.url, timeout=280) as client:
        await asyncio.gather(*(one(client, i) for i in range(REQUESTS)))


@pytest.mark.timeout(300)
def test_a_run_of_32_streams_costs_two_writes_a_step_and_four_a_request(stack: Stack) -> None:
    redis = connect(stack.redis_url)
    stack.wait_idle()
    before = _calls(redis.info("commandstats"))
    with stack.watch_log() as watch:
        asyncio.run(_run(stack))
        stack.wait_idle()
    after = _calls(redis.info("commandstats"))
    redis.close()
    used = {name: after[name] - before.get(name, 0) for name in after}
    steps, tokens = len(watch.results), REQUESTS * OUTPUT_TOKENS
    budget = 2 * steps + 4 * REQUESTS
    writes = used["xadd"]
    decode = watch.steady_decode_plans()
    plan_bytes = sum(size - 8 * blocks for size, blocks in decode) / len(decode)
    result_bytes = sum(size - 4 * rows for size, rows in watch.results) / steps
    print(
        f"\n{steps} steps, {tokens} tokens: {writes} stream writes (budget {budget}); "
        f"steady-decode plan {plan_bytes:.0f} bytes + 8 per changed block ({len(decode)} plans, "
        f"whole {sum(s for s, _ in decode) / len(decode):.0f}), result {result_bytes:.0f} bytes + 4 per row"
    )
    assert steps >= OUTPUT_TOKENS and len(decode) > OUTPUT_TOKENS // 2
    assert writes <= budget
    assert plan_bytes <= 200 and result_bytes <= 200
    # No command per token: everything that is not a heartbeat grows with steps and requests.
    heartbeats = {"set", "sadd", "smembers", "mget", "ping", "hello", "auth", "client", "info", "get", "select"}
    busiest = {name: count for name, count in used.items() if name not in heartbeats and "|" not in name}
    assert sum(busiest.values()) < 12 * steps + 16 * REQUESTS, busiest
    assert max(busiest.values()) < tokens, busiest
