"""Requests that began before this gateway follows them: the record first, then the log behind it, read again."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import redis.asyncio

from services.gateway.streams.channel import ROLLED_BACK, Ending, TokenChannel
from shared.keys import Keys
from shared.messages import FIELD
from shared.records import RequestRecord, Seat, parse_record
from shared.step_log import StepLogFollower
from shared.streams import START, Entry, entry_order

PAGE = 500

Apply = Callable[[Entry, StepLogFollower], bool]
"""Hands an entry's news to whom they concern; whether tokens of some request are missing."""


class Resumption(NamedTuple):
    """A live request that continues behind `log_id`. Ordered by its place in the log."""

    order: tuple[int, int]
    log_id: str
    request_id: str
    committed: int
    seat: Seat | None


def restore(channel: TokenChannel, record: RequestRecord | None, *, is_rolled_back: bool = False) -> Resumption | None:
    """Bring a channel up to its record; where it continues, or None if it has ended. `is_rolled_back`: Redis lost what
    it knew, so what it does not know now it may have lost."""
    if record is None:
        code, message = ROLLED_BACK if is_rolled_back else ("request_lost", "the request's record is gone")
        channel.end(Ending.failure(code, message))
        return None
    if record.final is not None:
        channel.end_with(record)
        return None
    channel.num_cached_tokens = record.num_cached_tokens or channel.num_cached_tokens
    channel.offer(0, record.output)
    log_id = record.log_id if record.log_id != START else channel.start_id
    return Resumption(entry_order(log_id), log_id, channel.request_id, len(record.output), record.seat)


class CatchUp:
    """A follower of its own that reads from the oldest record on; each request joins where its own record ends."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, resumptions: Iterable[Resumption]) -> None:
        self.follower = StepLogFollower()
        self._client = client
        self._keys = keys
        self._waiting = sorted(set(resumptions), reverse=True)
        self.furthest = self._waiting[0].log_id if self._waiting else START
        """The record that is ahead of all others."""
        self.position = self._waiting[-1].log_id if self._waiting else START
        """Everything up to this entry has been applied."""

    async def read(self, until: str, apply: Apply) -> bool:
        """Apply the log up to `until`, or further if a record is; whether tokens are missing."""
        missing = False
        until = max(until, self.furthest, key=entry_order)
        while entry_order(self.position) < entry_order(until):
            page = await self._page(until)
            if not page:
                break
            for entry in page:
                self._join(before=entry_order(entry.entry_id))
                missing = apply(entry, self.follower) or missing
            self.position = page[-1].entry_id
        self._join(before=None)
        self.position = max(self.position, until, key=entry_order)
        return missing

    def _join(self, *, before: tuple[int, int] | None) -> None:
        while self._waiting and (before is None or self._waiting[-1].order < before):
            item = self._waiting.pop()
            self.follower.track(item.request_id, item.committed, item.seat)

    async def _page(self, until: str) -> list[Entry]:
        rows: Any = await self._client.xrange(self._keys.steps, min=f"({self.position}", max=until, count=PAGE)
        return [Entry(entry_id.decode(), fields.get(FIELD, b"")) for entry_id, fields in rows]


async def read_records(
    client: redis.asyncio.Redis, keys: Keys, request_ids: Iterable[str]
) -> dict[str, RequestRecord | None]:
    """The records of these requests, in one round trip; None for those that are gone or unreadable."""
    request_ids = list(request_ids)
    if not request_ids:
        return {}
    async with client.pipeline(transaction=False) as pipe:
        for request_id in request_ids:
            pipe.hgetall(keys.request(request_id))
        raws: Any = await pipe.execute()
    return {request_id: parse_record(raw) for request_id, raw in zip(request_ids, raws, strict=True)}
