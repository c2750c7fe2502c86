"""What was read and what is read must be one log, whatever happens to Redis and to the connection in between."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import redis

from services.gateway.streams.log_source import LogSource
from shared.keys import Keys
from shared.messages import FIELD
from shared.streams import START

T = TypeVar("T")


def append(client: redis.Redis, keys: Keys) -> str:
    entry_id: bytes = client.xadd(keys.steps, {FIELD: b"x"})  # type: ignore[assignment]
    return entry_id.decode()


def with_source(url: str, keys: Keys, work: Callable[[LogSource], Awaitable[T]]) -> T:
    async def run() -> T:
        source = LogSource(url, keys, block_s=0.1)
        try:
            return await work(source)
        finally:
            await source.close()

    return asyncio.run(run())


def test_what_comes_over_a_connection_that_was_opened_anew_is_not_handed_out(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    """The connection closes while nobody waits on it: the client opens another without a word, maybe to a Redis that
    was started anew and lost entries."""
    position = append(redis_client, keys)

    async def work(source: LogSource) -> None:
        assert await source.examine(START) == "" and source.tail == position
        assert await source.read(position) == ()
        redis_client.client_kill_filter(_type="normal", skipme=True)
        await asyncio.sleep(0.05)
        append(redis_client, keys)
        assert await source.read(position) is None
        assert not source.is_examined
        assert await source.examine(position) == ""
        entries = await source.read(position)
        assert entries is not None and len(entries) == 1

    with_source(redis_url, keys, work)


@pytest.mark.parametrize("grown", [False, True], ids=["empty", "grown past our position"])
def test_a_log_that_was_emptied_under_an_open_connection_is_noticed(
    redis_url: str, redis_client: redis.Redis, keys: Keys, grown: bool
) -> None:
    position = append(redis_client, keys)

    async def work(source: LogSource) -> None:
        assert await source.examine(START) == ""
        redis_client.flushall()
        if grown:
            append(redis_client, keys)
        assert await source.examine(position) != ""
        assert source.is_examined

    with_source(redis_url, keys, work)


def test_a_log_that_grows_and_is_trimmed_behind_us_is_intact(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    entry_ids = [append(redis_client, keys) for _ in range(5)]

    async def work(source: LogSource) -> None:
        assert await source.examine(START) == ""
        redis_client.xtrim(keys.steps, minid=entry_ids[2], approximate=False)
        assert await source.examine(entry_ids[3]) == ""
        assert await source.examine(entry_ids[1]) != "", "entries that we have not read are gone"

    with_source(redis_url, keys, work)
