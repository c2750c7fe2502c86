"""The one reader of the step log in this process.

Every entry is decoded once; a `StepLogFollower` finds the rows of this gateway's own requests. The position moves on
only after an entry was applied, so a lost connection loses nothing. When steps are missing (a gap), every live request
is resumed from its record: the folded output first, then the log behind the record, read again.

    record of A    ######------------------|            #  folded output
    record of B    ##########--------------|            -  read again from the log
    new request C                          |===         =  still to come
                                           position
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.gateway.streams.channel import Ending, TokenChannel
from shared.errors import ProtocolError
from shared.keys import Keys
from shared.messages import FIELD, Decoder, EndReason, EventKind, FinishReason, LogMessage, RequestEvent
from shared.records import RequestRecord, Seat, parse_record
from shared.redis_client import RedisFailure, connect_async, connect_async_blocking
from shared.step_log import StepLogFollower, Update
from shared.streams import START, Entry, entry_order, last_id_async, read_async

BLOCK_S = 1.0
READ_COUNT = 64
"""Entries per read: small, so that responses get the event loop between reads under backlog."""
QUIET_S = 5.0
"""A request without news for this long is compared with its record."""
PAGE = 500
HOLE_RETRY_S = 0.2
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReaderCounters:
    """What the reader met."""

    entries: int = 0
    unreadable: int = 0
    rebuilds: int = 0
    failures: int = 0


class _Resumption(NamedTuple):
    """A live request that continues behind `log_id`. Ordered by its place in the log."""

    order: tuple[int, int]
    log_id: str
    request_id: str
    committed: int
    seat: Seat | None


class StepLogReader:
    """Feeds the channels of live requests from the step log."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        *,
        outage_limit_s: float,
        pool_outage_s: Callable[[], float],
        block_s: float = BLOCK_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._keys = keys
        self._client = connect_async(url)
        self._blocking = connect_async_blocking(url, block_s=block_s)
        self._block_ms = int(block_s * 1000)
        self._quiet_s = quiet_s
        self._outage_limit_s = outage_limit_s
        self._pool_outage_s = pool_outage_s
        self._decoder: Decoder[Any] = Decoder(LogMessage)
        self._follower = StepLogFollower()
        self._channels: dict[str, TokenChannel] = {}
        self._position = START
        self._started = asyncio.Event()
        self._rebuild_due = False
        self._ended: dict[str, None] = {}
        """Ended requests whose channel waits for the final record."""
        self._hole_since = 0.0
        self._last_check = 0.0
        self.last_turn: float | None = None
        """Monotonic time of the last successful read, empty or not."""
        self.counters = ReaderCounters()

    @property
    def num_live(self) -> int:
        return len(self._channels)

    @property
    def is_started(self) -> bool:
        """Whether the tail of the log is known: from then on no token can be missed."""
        return self._started.is_set()

    def track(self, channel: TokenChannel) -> None:
        """Follow a request. To be called before it is submitted and after the reader has started."""
        assert self.is_started
        channel.start_id = self._position
        channel.last_news = _now()
        self._channels[channel.request_id] = channel
        self._follower.track(channel.request_id)

    def untrack(self, channel: TokenChannel) -> None:
        """Forget a request: its response is complete or gone."""
        if self._channels.pop(channel.request_id, None) is not None:
            self._follower.untrack(channel.request_id)

    def fail_all(self, code: str, message: str) -> None:
        """End every live request with one error."""
        for channel in list(self._channels.values()):
            channel.end(Ending.failure(code, message))

    # ---------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Read until cancelled. Redis failures are waited out with back-off; the position stays."""
        backoff, down_since = MIN_BACKOFF_S, 0.0
        try:
            while True:
                try:
                    await self._open()
                    while True:
                        await self._turn()
                        backoff, down_since = MIN_BACKOFF_S, 0.0
                except RedisFailure as error:
                    down_since = down_since or _now()
                    await self._on_failure(error, _now() - down_since)
                    await asyncio.sleep(backoff)
                    backoff = min(backoff * 2, MAX_BACKOFF_S)
        finally:
            await self._client.aclose()
            await self._blocking.aclose()

    async def _on_failure(self, error: Exception, down_s: float) -> None:
        self.counters.failures += 1
        logger.warning("step log: %s, down for %.1f s, position %s", type(error).__name__, down_s, self._position)
        await self._blocking.connection_pool.disconnect()
        if down_s > self._outage_limit_s:
            self.fail_all("redis_unreachable", "the message log has been unreachable for too long")

    async def _open(self) -> None:
        """Find the tail at first; later make sure that the log still reaches our position."""
        tail = await last_id_async(self._client, self._keys.steps)
        if not self._started.is_set():
            self._position = tail
            self._started.set()
            self.last_turn = time.monotonic()
        elif entry_order(tail) < entry_order(self._position):
            logger.error("step log: its tail %s is behind position %s: data was lost", tail, self._position)
            self._position = tail
            self._rebuild_due = True

    async def _turn(self) -> None:
        if self._rebuild_due:
            await self._rebuild()
        answer = await read_async(
            self._blocking, {self._keys.steps: self._position}, block_ms=self._block_ms, count=READ_COUNT
        )
        for entry in answer.get(self._keys.steps, ()):
            self._rebuild_due = self._apply(entry)
            self._position = entry.entry_id
            if self._rebuild_due:
                break  # the follower lacks rows: what follows is read again after the rebuild
        if self._ended:
            await self._read_final_records()
        if _now() - self._last_check > 1.0:
            self._last_check = _now()
            await self._check_quiet()
        self.last_turn = time.monotonic()

    # ---------------------------------------------------------------- entries

    def _apply(self, entry: Entry) -> bool:
        """Hand the entry's news to the channels; whether tokens of some request are missing."""
        self.counters.entries += 1
        try:
            message: LogMessage = self._decoder.decode(entry.payload)
            updates = self._follower.apply(message)
        except ProtocolError as error:
            # If it was a step, the next one of its worker shows a gap; anything else concerns nobody here.
            self.counters.unreadable += 1
            logger.warning("step log: entry %s skipped: %s", entry.entry_id, type(error).__name__)
            return False
        missing = False
        for update in updates:
            channel = self._channels.get(update.request_id)
            if channel is not None and channel.ending is None:
                missing = self._deliver(channel, update) or missing
        return missing

    def _deliver(self, channel: TokenChannel, update: Update) -> bool:
        channel.num_cached_tokens = update.num_cached_tokens or channel.num_cached_tokens
        if update.tokens:
            channel.last_news = _now()
            channel.offer(update.num_committed - len(update.tokens), update.tokens)
        if update.gap or channel.committed < update.num_committed:
            return True
        if channel.wants_record:
            if update.event is not None and update.event.kind is EventKind.FINISHED:
                self._ended[channel.request_id] = None
        elif update.end_reason is not None:
            channel.end(Ending.from_worker(EndReason(update.end_reason)))
        elif update.event is not None and update.event.kind is EventKind.FINISHED:
            return self._finish(channel, update.event)
        return False

    def _finish(self, channel: TokenChannel, event: RequestEvent) -> bool:
        """A terminal event. If the step behind it was missed, the record tells how it ended, and what came before."""
        natural = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if natural or event.num_output_tokens > channel.committed:
            return True
        channel.end(Ending.from_event(event))
        return False

    # ---------------------------------------------------------------- records

    async def _read_final_records(self) -> None:
        """Hand out the records of requests whose terminal event was read: event and record are one commit."""
        due = [request_id for request_id in self._ended if request_id in self._channels]
        for request_id, record in (await self._read_records(due)).items():
            channel = self._channels.get(request_id)
            if channel is not None and record is not None and record.final is not None:
                channel.end_with(record)
            elif channel is not None:
                channel.end(Ending.failure("request_lost", "the request's record is gone"))
        self._ended.clear()

    async def _rebuild(self) -> None:
        """Resume every live request from its record with a fresh follower."""
        self.counters.rebuilds += 1
        known = dict(self._channels)
        records = await self._read_records(list(known))
        resumptions = [_restore(known[request_id], record) for request_id, record in records.items()]
        waiting = sorted((r for r in resumptions if r is not None), reverse=True)
        self._follower = StepLogFollower()
        for request_id in self._channels:
            if request_id not in known:
                self._follower.track(request_id)  # came meanwhile: its tokens are still to come
        self._rebuild_due = await self._replay(waiting)
        await self._wait_for_fold()

    async def _replay(self, waiting: list[_Resumption]) -> bool:
        """Apply the log from the oldest record on; each request joins where its own record ends.

        A record may be ahead of this reader; the position then moves up to it. Answers whether tokens are missing.
        """
        missing = False
        after = waiting[-1].log_id if waiting else self._position
        until = max([self._position, *(w.log_id for w in waiting)], key=entry_order)
        page = await self._page(after, until)
        while page:
            for entry in page:
                self._resume(waiting, before=entry_order(entry.entry_id))
                missing = self._apply(entry) or missing
            after = page[-1].entry_id
            page = await self._page(after, until)
        self._resume(waiting, before=None)
        self._position = max(self._position, after, key=entry_order)
        return missing

    def _resume(self, waiting: list[_Resumption], *, before: tuple[int, int] | None) -> None:
        while waiting and (before is None or waiting[-1].order < before):
            item = waiting.pop()
            if item.request_id in self._channels:
                self._follower.track(item.request_id, item.committed, item.seat)

    async def _page(self, after: str, until: str) -> list[Entry]:
        rows: Any = await self._client.xrange(self._keys.steps, min=f"({after}", max=until, count=PAGE)
        return [Entry(entry_id.decode(), fields.get(FIELD, b"")) for entry_id, fields in rows]

    async def _wait_for_fold(self) -> None:
        """A hole in the log itself closes when the leader folds the records past it; give up after the outage limit."""
        if not self._rebuild_due:
            self._hole_since = 0.0
            return
        self._hole_since = self._hole_since or _now()
        if _now() - self._hole_since > self._outage_limit_s:
            self.fail_all("log_gap", "a part of the message log is lost")
        await asyncio.sleep(HOLE_RETRY_S)

    async def _read_records(self, request_ids: list[str]) -> dict[str, RequestRecord | None]:
        if not request_ids:
            return {}
        async with self._client.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.hgetall(self._keys.request(request_id))
            raws: Any = await pipe.execute()
        return {request_id: parse_record(raw) for request_id, raw in zip(request_ids, raws, strict=True)}

    # ---------------------------------------------------------------- no stream hangs for ever

    async def _check_quiet(self) -> None:
        """Requests without news: resume those whose record knows more, end them all if their pool is gone."""
        now = _now()
        quiet = [c for c in self._channels.values() if c.ending is None and now - c.last_news > self._quiet_s]
        if not quiet:
            return
        if self._pool_outage_s() > self._outage_limit_s:
            for channel in quiet:
                channel.end(Ending.failure("pool_unavailable", "no scheduler or worker has been alive for too long"))
            return
        async with self._client.pipeline(transaction=False) as pipe:
            for channel in quiet:
                key = self._keys.request(channel.request_id)
                for field in ("submission", "final", "output"):
                    pipe.hstrlen(key, field)
            sizes: Any = await pipe.execute()
        for i, channel in enumerate(quiet):
            channel.last_news = now
            submission, final, output = sizes[3 * i : 3 * i + 3]
            if not submission or final or output // 4 > channel.committed:
                self._rebuild_due = True


def _restore(channel: TokenChannel, record: RequestRecord | None) -> _Resumption | None:
    """Bring a channel up to its record; where it continues, or None if it has ended."""
    if record is None:
        channel.end(Ending.failure("request_lost", "the request's record is gone"))
        return None
    if record.final is not None:
        channel.end_with(record)
        return None
    channel.num_cached_tokens = record.num_cached_tokens or channel.num_cached_tokens
    channel.offer(0, record.output)
    log_id = record.log_id if record.log_id != START else channel.start_id
    return _Resumption(entry_order(log_id), log_id, channel.request_id, len(record.output), record.seat)


def _now() -> float:
    return asyncio.get_running_loop().time()
