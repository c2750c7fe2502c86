"""The step log as this process reads it, over one connection that is known to lead to the log that was read before.

A Redis that was started anew may have lost its last second and have grown past our position since; one that was emptied
under an open connection begins anew behind it. redis-py opens a connection again without a word, so what comes over
one that was not examined is not handed out.
"""

from collections.abc import Sequence
from typing import Any

from shared.keys import Keys
from shared.redis_client import connect_async_blocking
from shared.streams import START, Entry, entry_order, read_async

READ_COUNT = 64
"""Entries per read: small, so that responses get the event loop between reads under backlog."""


class LogSource:
    """Reads entries, and notices when they are no continuation of those before."""

    def __init__(self, url: str, keys: Keys, *, block_s: float) -> None:
        self._client = connect_async_blocking(url, block_s=block_s, on_connect=self._on_connect)
        self._keys = keys
        self._block_ms = int(block_s * 1000)
        self._run_id = ""
        self.tail = START
        """Of the log, when it was last examined."""
        self.is_examined = False
        """Whether the connection that reads is the one that was examined."""

    def _on_connect(self) -> None:
        self.is_examined = False

    async def examine(self, position: str) -> str:
        """What shows that entries up to `position` may have been lost, for people; empty if nothing does."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.xrange(self._keys.steps, count=1)
            pipe.xrevrange(self._keys.steps, count=1)
            pipe.info("server")
            first, last, server = await pipe.execute()
        self.is_examined = True
        self.tail = _id_of(last)
        before, self._run_id = self._run_id, server["run_id"]
        if before not in ("", self._run_id):
            return "Redis was started anew"
        if entry_order(self.tail) < entry_order(position):
            return f"its tail {self.tail} is behind"
        if position != START and entry_order(_id_of(first)) > entry_order(position):
            return f"it begins at {_id_of(first)}"
        return ""

    async def read(self, position: str) -> Sequence[Entry] | None:
        """Entries behind `position`, waited for; None if they came over a connection that has to be examined."""
        answer = await read_async(self._client, {self._keys.steps: position}, block_ms=self._block_ms, count=READ_COUNT)
        return answer.get(self._keys.steps, ()) if self.is_examined else None

    async def disconnect(self) -> None:
        """After a failure: an unread reply would answer the next command."""
        await self._client.connection_pool.disconnect()

    async def close(self) -> None:
        await self._client.aclose()


def _id_of(rows: Any) -> str:
    return rows[0][0].decode() if rows else START
