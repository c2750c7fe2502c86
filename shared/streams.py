"""Reading streams: XREAD and XRANGE as plain lists of (entry id, payload)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import redis
import redis.asyncio

from shared.channel import Channel, Command
from shared.messages import FIELD

START = "0-0"


class Entry(NamedTuple):
    """One stream entry. `payload` is empty if the entry has no message field (foreign or trimmed)."""

    entry_id: str
    payload: bytes


def entry_order(entry_id: str) -> tuple[int, int]:
    """Sort key of an entry id such as `1700000000000-3`."""
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def read(
    client: redis.Redis, positions: Mapping[str, str], *, block_ms: int | None = None, count: int | None = None
) -> dict[str, list[Entry]]:
    """Entries after each stream's position, waiting up to `block_ms` for the first. Streams without news are absent."""
    return _entries(client.xread(dict(positions), count=count, block=block_ms))  # type: ignore[arg-type]


def read_channel(
    channel: Channel, positions: Mapping[str, str], *, block_ms: int | None = None, count: int | None = None
) -> dict[str, list[Entry]]:
    """As `read`, for what is read at every step. The connection's time-out must be longer than `block_ms`."""
    return raw_entries(channel.execute(*xread(positions, block_ms=block_ms, count=count)))


def xread(positions: Mapping[str, str], *, block_ms: int | None = None, count: int | None = None) -> Command:
    """The command of `read_channel`, for who sends it before he needs the answer; `raw_entries` are in its reply."""
    command: list[str | int] = ["XREAD"]
    if count is not None:
        command += ["COUNT", count]
    if block_ms is not None:
        command += ["BLOCK", block_ms]
    return (*command, "STREAMS", *positions, *positions.values())


def raw_entries(reply: Any) -> dict[str, list[Entry]]:
    """What `read` answers, from a raw reply to XREAD."""
    return {stream.decode(): [_raw_entry(i, fields) for i, fields in rows] for stream, rows in reply or ()}


async def read_async(
    client: redis.asyncio.Redis, positions: Mapping[str, str], *, block_ms: int | None = None, count: int | None = None
) -> dict[str, list[Entry]]:
    """As `read`, for asyncio."""
    return _entries(await client.xread(dict(positions), count=count, block=block_ms))  # type: ignore[arg-type]


def scan(
    client: redis.Redis, stream: str, *, after: str = START, until: str = "+", page: int = 1000
) -> Iterator[Entry]:
    """All entries of `stream` with `after` < id <= `until`, page by page."""
    while True:
        rows: Any = client.xrange(stream, min=f"({after}", max=until, count=page)
        for entry_id, fields in rows or ():
            yield _entry(entry_id, fields)
        if not rows or len(rows) < page:
            return
        after = rows[-1][0].decode()


def last_id(client: redis.Redis, stream: str) -> str:
    """Id of the last entry, or `0-0`."""
    rows: Any = client.xrevrange(stream, count=1)
    return rows[0][0].decode() if rows else START


async def last_id_async(client: redis.asyncio.Redis, stream: str) -> str:
    """As `last_id`, for asyncio."""
    rows: Any = await client.xrevrange(stream, count=1)
    return rows[0][0].decode() if rows else START


def _entries(answer: Any) -> dict[str, list[Entry]]:
    return {stream.decode(): [_entry(i, fields) for i, fields in rows] for stream, rows in answer or ()}


def _entry(entry_id: bytes, fields: Mapping[bytes, bytes] | None) -> Entry:
    return Entry(entry_id.decode(), fields.get(FIELD, b"") if fields else b"")


def _raw_entry(entry_id: bytes, fields: Sequence[bytes] | None) -> Entry:
    """From names and values in turn; almost always it is one of each."""
    if fields and fields[0] == FIELD:
        return Entry(entry_id.decode(), fields[1])
    return _entry(entry_id, dict(zip(fields[::2], fields[1::2], strict=True)) if fields else None)
