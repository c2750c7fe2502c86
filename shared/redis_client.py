"""The only constructors of Redis clients.

Retries belong to the callers, who know which command may be repeated: the clients themselves never retry. A command
that was cancelled or timed out closes its connection (redis-py does so): an unread reply would answer the next one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.channel import Channel

CONNECT_TIMEOUT_S = 2.0
MAX_CONNECTIONS = 8
"""Of one asyncio client. To open one costs as much CPU time (1 to 2 ms) as ten to twenty commands, so a burst must not
open one each: measured with 200 commands at once, 8 are faster than 4, and than 32 even if those are open already."""
BLOCK_MARGIN_S = 5.0
"""A blocking read may last this much longer than asked before its connection counts as broken."""

RedisFailure: tuple[type[Exception], ...] = (redis.RedisError, ConnectionError, TimeoutError, OSError)
"""Redis is unreachable, restarting, out of memory or refused the command: retry with back-off."""


def _options(timeout_s: float) -> dict[str, object]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "decode_responses": False,
        "protocol": 2,
    }


def connect(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """A client for ordinary commands. Connects at its first command."""
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_options(timeout_s))


def connect_blocking(url: str, *, block_s: float) -> redis.Redis:
    """A client for one reader that blocks up to `block_s` seconds: its own connection, its own timeout."""
    return connect(url, timeout_s=block_s + BLOCK_MARGIN_S)


def open_channel(url: str, *, timeout_s: float = 5.0) -> Channel:
    """A connection for the commands of every step; one for a reader that blocks needs a longer time-out than that."""
    return Channel(connect(url, timeout_s=timeout_s))


def open_channel_blocking(url: str, *, block_s: float) -> Channel:
    """As `connect_blocking`, for what is read at every step."""
    return open_channel(url, timeout_s=block_s + BLOCK_MARGIN_S)


def connect_async(
    url: str, *, timeout_s: float = 5.0, on_connect: Callable[[], None] | None = None
) -> redis.asyncio.Redis:
    """As `connect`, for asyncio. Commands of many tasks share a few connections; who finds none free waits for one.

    A connection that Redis closed while nobody used it is opened anew without a word: `on_connect` is called whenever
    one was opened, before its first command.
    """
    options = _options(timeout_s) | ({} if on_connect is None else {"redis_connect_func": _announced(on_connect)})
    pool = _Pool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=timeout_s,
        retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
        **options,
    )
    return redis.asyncio.Redis.from_pool(pool)


async def open_ahead(client: redis.asyncio.Redis) -> None:
    """Open all of its connections now, so that the first burst need not. Without Redis they are opened when needed."""
    with suppress(*RedisFailure):
        await asyncio.gather(*(client.ping() for _ in range(MAX_CONNECTIONS)))


class _Pool(redis.asyncio.BlockingConnectionPool):
    """Its connections fail by a `RedisFailure` on every event loop."""

    def __init__(self, *, connection_class: Any = redis.asyncio.Connection, **options: Any) -> None:
        super().__init__(connection_class=_guarded(connection_class), **options)


def _guarded(kind: Any) -> Any:
    """uvloop says RuntimeError where asyncio says ConnectionError: to who writes to a connection that was reset."""

    class Guarded(kind):  # type: ignore[misc]
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            try:
                await super().send_packed_command(command, check_health)
            except RuntimeError as error:
                raise redis.ConnectionError(str(error)) from error

    return Guarded


def _announced(on_connect: Callable[[], None]) -> Callable[[Any], Awaitable[None]]:
    async def greet(connection: Any) -> None:
        await connection.on_connect()
        on_connect()

    return greet


def connect_async_blocking(
    url: str, *, block_s: float, on_connect: Callable[[], None] | None = None
) -> redis.asyncio.Redis:
    """As `connect_blocking`, for asyncio."""
    return connect_async(url, timeout_s=block_s + BLOCK_MARGIN_S, on_connect=on_connect)
