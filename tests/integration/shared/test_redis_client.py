"""Clients of Redis."""

import asyncio

import pytest
import redis

from shared.redis_client import MAX_CONNECTIONS, RedisFailure, connect_async, open_ahead
from tests.harness.ports import free_port


async def test_a_burst_opens_few_connections(redis_url: str, redis_client: redis.Redis) -> None:
    """16 streams that came to a gateway at once opened a connection each, which took longer than all of their commands
    together."""

    def num_opened() -> int:
        return int(redis_client.info("stats")["total_connections_received"])

    before, client = num_opened(), connect_async(redis_url)
    await asyncio.gather(*(client.get("anything") for _ in range(200)))
    assert 1 <= num_opened() - before <= MAX_CONNECTIONS <= 8
    await client.aclose()


async def test_connections_that_were_opened_ahead_are_used(redis_url: str, redis_client: redis.Redis) -> None:
    client = connect_async(redis_url)
    await open_ahead(client)
    before = int(redis_client.info("stats")["total_connections_received"])
    await asyncio.gather(*(client.get("anything") for _ in range(50)))
    assert int(redis_client.info("stats")["total_connections_received"]) == before
    await client.aclose()


async def test_without_redis_nothing_is_opened_ahead() -> None:
    client = connect_async(f"redis://127.0.0.1:{free_port()}/0")
    await open_ahead(client)
    with pytest.raises(RedisFailure):
        await client.ping()
    await client.aclose()
