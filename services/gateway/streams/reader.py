"""The one reader of the step log in this process.

Every entry is decoded once; a `StepLogFollower` finds the rows of this gateway's own requests. The position moves on
only after an entry was applied, so a lost connection loses nothing. When steps are missing (a gap), every live request
is resumed from its record: the folded output first, then the log behind the record, read again. So is, for itself, a
request that another gateway followed before (`adopt`).

    record of A    ######------------------|            #  folded output
    record of B    ##########--------------|            -  read again from the log
    new request C                          |===         =  still to come
                                           position
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.cancelling import cancel_and_wait
from services.gateway.streams.catch_up import CatchUp, read_records, restore
from services.gateway.streams.channel import Ending, TokenChannel
from shared.errors import ProtocolError
from shared.keys import Keys
from shared.messages import Decoder, EndReason, EventKind, FinishReason, LogMessage, RequestEvent, StepResult
from shared.redis_client import RedisFailure, connect_async, connect_async_blocking
from shared.step_log import StepLogFollower, Update
from shared.streams import START, Entry, entry_order, last_id_async, read_async

BLOCK_S = 1.0
READ_COUNT = 64
"""Entries per read: small, so that responses get the event loop between reads under backlog."""
QUIET_S = 5.0
"""A request without news for this long is compared with its record."""
BEHIND_S = 2.0
"""An adopted request's record may be ahead of this reader for so long; then everything is rebuilt."""
HOLE_RETRY_S = 0.2
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReaderCounters:
    """What the reader met."""

    entries: int = 0
    unreadable: int = 0
    rebuilds: int = 0
    adoptions: int = 0
    """Each of any number of requests."""
    failures: int = 0


Newcomers = list[tuple[Sequence[TokenChannel], "asyncio.Future[None]"]]
"""Channels of each adoption, and who waits for it."""


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
        self._channels: dict[str, list[TokenChannel]] = {}
        """A request may be read by several clients."""
        self._position = START
        self._run_id = ""
        self._at_rest = asyncio.Lock()
        """Held while the position moves, or must not."""
        self._started = asyncio.Event()
        self._newcomers: Newcomers = []
        self._adopting: asyncio.Task[None] | None = None
        self._rebuild_due = False
        self._ended: dict[str, None] = {}
        """Ended requests whose channel waits for the final record."""
        self._hole_since = 0.0
        self._last_check = 0.0
        self.last_turn: float | None = None
        """Monotonic time of the last successful read, empty or not."""
        self.counters = ReaderCounters()
        self.is_behind = False
        """Whether the last read brought several steps of one worker: they come faster than they are handled."""
        self._steps_read: dict[str, int] = {}
        """By worker, in the present read."""

    @property
    def num_live(self) -> int:
        return sum(map(len, self._channels.values()))

    @property
    def is_started(self) -> bool:
        """Whether the tail of the log is known: from then on no token can be missed."""
        return self._started.is_set()

    def track(self, channel: TokenChannel) -> None:
        """Follow a request. To be called before it is submitted and after the reader has started."""
        assert self.is_started
        channel.start_id = self._position
        self._add(channel)
        self._follower.track(channel.request_id)

    async def adopt(self, channels: Sequence[TokenChannel]) -> None:
        """Follow requests that were submitted earlier, anywhere, from their first token on; or learn how they ended.

        Those that come at the same time, as after the death of another gateway, share one reading of the log.

        Raises:
            RedisFailure: Redis did not answer; untrack the channels.
        """
        assert self.is_started
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._newcomers.append((channels, done))
        if self._adopting is None or self._adopting.done():
            self._adopting = asyncio.get_running_loop().create_task(self._adopt_all())
        await done

    async def _adopt_all(self) -> None:
        while self._newcomers:
            newcomers, self._newcomers = self._newcomers, []
            try:
                await self._adopt(newcomers)
            except Exception as error:
                for _, done in newcomers:
                    if not done.done():
                        done.set_exception(error)

    async def _adopt(self, newcomers: Newcomers) -> None:
        """They are read by a follower of their own; where that stands where this reader stands, they change over."""
        self.counters.adoptions += 1
        adopted: dict[str, list[TokenChannel]] = {}
        for channels, _ in newcomers:
            for channel in channels:
                channel.start_id = START
                adopted.setdefault(channel.request_id, []).append(channel)
        records = await read_records(self._client, self._keys, adopted)
        resumptions = [r for i in adopted for c in adopted[i] if (r := restore(c, records[i])) is not None]
        catch_up = CatchUp(self._client, self._keys, resumptions)

        def apply(entry: Entry, follower: StepLogFollower) -> bool:
            return self._apply(entry, follower, lambda request_id: adopted[request_id])

        missing = await catch_up.read(self._position, apply) if resumptions else False
        is_close = await self._wait_for_position(catch_up.position)
        async with self._at_rest:
            if is_close and resumptions:
                missing = await catch_up.read(self._position, apply) or missing
            for channels, done in newcomers:
                if not done.cancelled():
                    self._change_over(channels, catch_up.follower)
            self._rebuild_due |= missing or not is_close
            await self._read_final_records()
        for _, done in newcomers:
            if not done.done():
                done.set_result(None)

    def _change_over(self, channels: Sequence[TokenChannel], follower: StepLogFollower) -> None:
        for channel in channels:
            if channel.ending is None:
                self._add(channel)
                if len(self._channels[channel.request_id]) == 1:
                    self._follower.track(channel.request_id, *follower.place_of(channel.request_id))

    async def _wait_for_position(self, entry_id: str) -> bool:
        """A record may be ahead of this reader: wait until it is not. Whether that was so in time."""
        until = _now() + BEHIND_S
        while entry_order(self._position) < entry_order(entry_id):
            if _now() > until:
                return False
            await asyncio.sleep(0.002)
        return True

    def _add(self, channel: TokenChannel) -> None:
        channel.last_news = _now()
        self._channels.setdefault(channel.request_id, []).append(channel)

    def untrack(self, channel: TokenChannel) -> None:
        """Forget a request: its response is complete or gone."""
        channels = self._channels.get(channel.request_id, [])
        if channel in channels:
            channels.remove(channel)
            if not channels:
                del self._channels[channel.request_id]
                self._follower.untrack(channel.request_id)

    def fail_all(self, code: str, message: str) -> None:
        """End every live request with one error."""
        for channel in self._all_channels():
            channel.end(Ending.failure(code, message))

    def _all_channels(self) -> list[TokenChannel]:
        return [channel for channels in self._channels.values() for channel in channels]

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
            if self._adopting is not None:
                await cancel_and_wait(self._adopting)
            await self._client.aclose()
            await self._blocking.aclose()

    async def _on_failure(self, error: Exception, down_s: float) -> None:
        self.counters.failures += 1
        logger.warning("step log: %s, down for %.1f s, position %s", type(error).__name__, down_s, self._position)
        await self._blocking.connection_pool.disconnect()
        if down_s > self._outage_limit_s:
            self.fail_all("redis_unreachable", "the message log has been unreachable for too long")

    async def _open(self) -> None:
        """Find the tail at first; later make sure that the log is the one that we read and still reaches our position.

        A Redis that was started anew may have lost its last second, and have grown past our position since.
        """
        tail = await last_id_async(self._client, self._keys.steps)
        server: Any = await self._client.info("server")
        is_other, self._run_id = server["run_id"] != self._run_id, server["run_id"]
        if not self._started.is_set():
            self._position = tail
            self._started.set()
            self.last_turn = time.monotonic()
        elif entry_order(tail) < entry_order(self._position):
            logger.error("step log: its tail %s is behind position %s: data was lost", tail, self._position)
            self._position = tail
            self._rebuild_due = True
        elif is_other:
            logger.warning("step log: Redis was started anew")
            self._rebuild_due = True

    async def _turn(self) -> None:
        if self._rebuild_due:
            async with self._at_rest:
                await self._rebuild()
            await self._wait_for_fold()
        answer = await read_async(
            self._blocking, {self._keys.steps: self._position}, block_ms=self._block_ms, count=READ_COUNT
        )
        async with self._at_rest:
            await self._take(answer.get(self._keys.steps, ()))
        if _now() - self._last_check > 1.0:
            self._last_check = _now()
            await self._check_quiet()
        self.last_turn = time.monotonic()

    async def _take(self, entries: Sequence[Entry]) -> None:
        self._steps_read = {}
        for entry in entries:
            if self._rebuild_due:
                break  # the follower lacks rows: what follows is read again after the rebuild
            self._rebuild_due = self._apply(entry, self._follower, self._channels_of)
            self._position = entry.entry_id
        self.is_behind = max(self._steps_read.values(), default=0) > 1
        await self._read_final_records()

    # ---------------------------------------------------------------- entries

    def _channels_of(self, request_id: str) -> Sequence[TokenChannel]:
        return self._channels.get(request_id, ())

    def _apply(
        self, entry: Entry, follower: StepLogFollower, channels_of: Callable[[str], Sequence[TokenChannel]]
    ) -> bool:
        """Hand the entry's news to the channels; whether tokens of some request are missing."""
        self.counters.entries += 1
        try:
            message: LogMessage = self._decoder.decode(entry.payload)
            if isinstance(message, StepResult):
                self._steps_read[message.worker] = self._steps_read.get(message.worker, 0) + 1
            updates = follower.apply(message)
        except ProtocolError as error:
            # If it was a step, the next one of its worker shows a gap; anything else concerns nobody here.
            self.counters.unreadable += 1
            logger.warning("step log: entry %s skipped: %s", entry.entry_id, type(error).__name__)
            return False
        missing = False
        for update in updates:
            for channel in channels_of(update.request_id):
                if channel.ending is None:
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
        for request_id, record in (await read_records(self._client, self._keys, due)).items():
            for channel in self._channels_of(request_id):
                if record is not None and record.final is not None:
                    channel.end_with(record)
                else:
                    channel.end(Ending.failure("request_lost", "the request's record is gone"))
        self._ended.clear()

    async def _rebuild(self) -> None:
        """Resume every live request from its record with a fresh follower."""
        self.counters.rebuilds += 1
        known = self._all_channels()
        records = await read_records(self._client, self._keys, dict.fromkeys(c.request_id for c in known))
        resumptions = [r for c in known if (r := restore(c, records[c.request_id])) is not None]
        catch_up = CatchUp(self._client, self._keys, resumptions)
        self._follower = catch_up.follower
        for request_id in self._channels:
            if request_id not in records:
                self._follower.track(request_id)  # came meanwhile: its tokens are still to come

        def apply(entry: Entry, follower: StepLogFollower) -> bool:
            return self._apply(entry, follower, self._channels_of)

        self._rebuild_due = await catch_up.read(self._position, apply)
        self._position = max(self._position, catch_up.position, key=entry_order)
        for request_id in records:
            if request_id not in self._channels:
                self._follower.untrack(request_id)  # left meanwhile

    async def _wait_for_fold(self) -> None:
        """A hole in the log itself closes when the leader folds the records past it; give up after the outage limit."""
        if not self._rebuild_due:
            self._hole_since = 0.0
            return
        self._hole_since = self._hole_since or _now()
        if _now() - self._hole_since > self._outage_limit_s:
            self.fail_all("log_gap", "a part of the message log is lost")
        await asyncio.sleep(HOLE_RETRY_S)

    # ---------------------------------------------------------------- no stream hangs for ever

    async def _check_quiet(self) -> None:
        """Requests without news: resume those whose record knows more, end them all if their pool is gone."""
        now = _now()
        quiet = [c for c in self._all_channels() if c.ending is None and now - c.last_news > self._quiet_s]
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


def _now() -> float:
    return asyncio.get_running_loop().time()
