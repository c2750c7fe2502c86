"""Scripts of many tasks go to Redis in few round trips, and each has its own answer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis

from services.cli.ports import free_port
from services.gateway.streams import together as module
from services.gateway.streams.together import Together
from shared.redis_client import RedisFailure, connect_async

ECHO = b"return ARGV[1]"
UNKNOWN = "0" * 40


def with_scripts(url: str, work: Callable[[Together], Awaitable[None]]) -> None:
    async def run() -> None:
        client = connect_async(url)
        try:
            async with asyncio.timeout(10):
                await work(Together(client))
        finally:
            await client.aclose()

    asyncio.run(run())


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what went to Redis together."""
    sizes: list[int] = []
    send = Together._send

    async def counted(self: Together, calls: Any) -> None:
        sizes.append(len(calls))
        await send(self, calls)

    monkeypatch.setattr(Together, "_send", counted)
    return sizes


def test_a_burst_takes_few_round_trips(redis_url: str, redis_client: redis.Redis, batches: list[int]) -> None:
    async def work(scripts: Together) -> None:
        answers = await asyncio.gather(*(scripts.eval(ECHO, 0, str(number)) for number in range(100)))
        assert answers == [str(number).encode() for number in range(100)]
        assert await scripts.eval(ECHO, 0, "alone") == b"alone"

    with_scripts(redis_url, work)
    assert sum(batches) == 101 and len(batches) <= 101 // module.MOST_TOGETHER + 3
    assert max(batches) == module.MOST_TOGETHER


def test_an_error_is_its_callers_alone(redis_url: str, batches: list[int]) -> None:
    async def work(scripts: Together) -> None:
        calls = [scripts.eval(ECHO, 0, "a"), scripts.evalsha(UNKNOWN, 0), scripts.eval(ECHO, 0, "b")]
        first, second, third = await asyncio.gather(*calls, return_exceptions=True)
        assert (first, third) == (b"a", b"b") and isinstance(second, redis.exceptions.NoScriptError)

    with_scripts(redis_url, work)
    assert batches == [3]


def test_who_leaves_takes_nothing_from_the_others(redis_url: str, batches: list[int]) -> None:
    """One before its command is sent, one while the answer is under way."""

    async def work(scripts: Together) -> None:
        tasks = [asyncio.create_task(scripts.eval(ECHO, 0, name)) for name in "abcd"]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert batches == [3]
        tasks[1].cancel()
        assert await asyncio.gather(*tasks[2:]) == [b"c", b"d"]
        assert tasks[0].cancelled() and tasks[1].cancelled()
        assert await scripts.eval(ECHO, 0, "next") == b"next", "an answer that nobody took is no one else's"

    with_scripts(redis_url, work)
    assert batches == [3, 1]


def test_without_redis_all_are_told(batches: list[int]) -> None:
    async def work(scripts: Together) -> None:
        answers = await asyncio.gather(*(scripts.eval(ECHO, 0, "a") for _ in range(3)), return_exceptions=True)
        assert len(answers) == 3 and all(isinstance(answer, RedisFailure) for answer in answers)

    with_scripts(f"redis://127.0.0.1:{free_port()}", work)
    assert batches == [3]
