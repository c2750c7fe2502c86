"""The log costs one plan and one result per step, whatever the number of streams: counted by Redis itself."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from redis import Redis

from shared.redis_client import connect
from tests.harness.stack import LogWatch, Stack

REQUESTS = 32
OUTPUT_TOKENS = 64
pytestmark = [pytest.mark.model]


@pytest.fixture
def redis(stack: Stack) -> Iterator[Redis]:
    client = connect(stack.redis_url)
    yield client
    client.close()


def _calls(redis: Redis) -> dict[str, int]:
    stats: Any = redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}


async def _run(stack: Stack, requests: int) -> None:
    async def one(client: httpx.AsyncClient, index: int) -> None:
        body = {"model": stack.model, "prompt": f"Story {index}: once upon a time", "max_tokens": OUTPUT_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            assert [line async for line in answer.aiter_lines() if line.startswith("data:")][-1] == "data: [DONE]"

    async with httpx.AsyncClient(base_url=stack.url, timeout=280) as client:
        await asyncio.gather(*(one(client, i) for i in range(requests)))


def measure(stack: Stack, redis: Redis, requests: int) -> tuple[dict[str, int], LogWatch]:
    """Commands that a run of `requests` streams costs Redis, and what crossed the log."""
    stack.wait_idle()
    before = _calls(redis)
    with stack.watch_log() as watch:
        asyncio.run(_run(stack, requests))
        stack.wait_idle()
    return {name: count - before.get(name, 0) for name, count in _calls(redis).items()}, watch


@pytest.mark.timeout(300)
def test_a_run_of_32_streams_costs_two_writes_a_step_and_four_a_request(stack: Stack, redis: Redis) -> None:
    few, few_watch = measure(stack, redis, 8)
    many, many_watch = measure(stack, redis, REQUESTS)
    check_writes(many["xadd"], many_watch)
    check_commands(few, len(few_watch.results), many, len(many_watch.results))


def check_writes(num_writes: int, watch: LogWatch) -> None:
    """Stream writes of the run, and the size of its messages."""
    steps = len(watch.results)
    budget = 2 * steps + 4 * REQUESTS
    decode = watch.steady_decode_plans()
    plan_bytes = sum(size - 8 * blocks for size, blocks in decode) / len(decode)
    result_bytes = sum(size - 4 * rows for size, rows in watch.results) / steps
    print(
        f"\n{steps} steps, {REQUESTS * OUTPUT_TOKENS} tokens: {num_writes} stream writes (budget {budget}); "
        f"steady-decode plan {plan_bytes:.0f} bytes + 8 per changed block ({len(decode)} plans), "
        f"result {result_bytes:.0f} bytes + 4 per row"
    )
    assert steps >= OUTPUT_TOKENS and len(decode) > OUTPUT_TOKENS // 2
    assert num_writes <= budget
    assert plan_bytes <= 200 and result_bytes <= 200


def check_commands(few: dict[str, int], few_steps: int, many: dict[str, int], many_steps: int) -> None:
    """As many steps with four times the streams: what a stream adds is less than a command per token."""
    # Leases, statistics and the clients that this test opens itself.
    by_the_clock = {"set", "sadd", "smembers", "mget", "ping", "hello", "auth", "client", "info", "get", "select"}
    names = [name for name in many if "|" not in name and name not in by_the_clock]
    added = {name: many[name] - few.get(name, 0) for name in names}
    per_step = sum(few[name] for name in names if name in few) / few_steps
    per_request = (sum(added.values()) - per_step * (many_steps - few_steps)) / (REQUESTS - 8)
    print(f"{per_step:.1f} commands a step; a request of {OUTPUT_TOKENS} tokens adds {per_request:.1f}: {added}")
    assert per_request < OUTPUT_TOKENS
