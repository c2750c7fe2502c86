"""Clients of Redis: few connections, and whatever becomes of one is a `RedisFailure`, on the gateways' loop too."""

import asyncio
import random
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import uvloop

from services.cli.ports import free_port
from shared.redis_client import MAX_CONNECTIONS, RedisFailure, connect_async, connect_async_blocking, open_ahead
from tests.harness.proxy import TcpProxy

TRIES = 200


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


def test_writing_to_a_connection_that_was_reset_is_a_failure(redis_url: str) -> None:
    """It was a RuntimeError, which ended the gateway: uvloop has a word of its own for it."""

    async def write() -> None:
        client = connect_async(redis_url)
        connection: Any = await client.connection_pool.get_connection()
        connection._writer.transport.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(RedisFailure):
            await connection.send_command("PING")
        await client.connection_pool.release(connection)
        assert await client.ping()  # by a new one
        await client.aclose()

    uvloop.run(write())


def test_what_accepts_connections_and_resets_them_is_a_failure_every_time(redis_url: str) -> None:
    """As a proxy does whose Redis is away; then it comes back."""
    target = urlsplit(redis_url)

    async def knock(proxy: TcpProxy) -> None:
        client = connect_async_blocking(f"redis://:secret@127.0.0.1:{proxy.port}/0", block_s=0.1)
        for _ in range(TRIES):
            with pytest.raises(RedisFailure):
                await client.time()
        await client.aclose()

    with TcpProxy(str(target.hostname), int(target.port or 6379)) as proxy:
        proxy.go_down()
        uvloop.run(knock(proxy))


def test_no_reply_answers_the_command_after_a_cancelled_one(redis_url: str) -> None:
    rng = random.Random(0)

    async def cancel_and_ask() -> None:
        client = connect_async(redis_url)
        for number in range(TRIES):
            task = asyncio.ensure_future(client.echo(f"cancelled {number}"))
            await asyncio.sleep(rng.uniform(0, 0.0005))
            task.cancel()
            assert await client.echo(f"asked {number}") == f"asked {number}".encode()
            await asyncio.gather(task, return_exceptions=True)
        await client.aclose()

    uvloop.run(cancel_and_ask())
