"""Clients of Redis."""

import asyncio

import redis

from shared.redis_client import connect_async


async def test_a_burst_opens_few_connections(redis_url: str, redis_client: redis.Redis) -> None:
    """16 streams that came to a gateway at once opened a connection each, which took longer than all of their commands
    together."""

    def num_opened() -> int:
        return int(redis_client.info("stats")["total_connections_received"])

    before, client = num_opened(), connect_async(redis_url)
    await asyncio.gather(*(client.get("anything") for _ in range(200)))
    assert 1 <= num_opened() - before <= 8
    await client.aclose()
