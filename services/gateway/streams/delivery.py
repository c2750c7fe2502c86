"""From an entry of the step log to the channels of the requests that it concerns."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import redis.asyncio

from services.gateway.streams.catch_up import read_records
from services.gateway.streams.channel import Ending, TokenChannel
from services.gateway.streams.live_requests import ReaderCounters, now
from shared.errors import ProtocolError
from shared.keys import Keys
from shared.messages import Decoder, EndReason, EventKind, FinishReason, LogMessage, RequestEvent, StepResult
from shared.step_log import StepLogFollower, Update
from shared.streams import Entry

logger = logging.getLogger(__name__)


class Delivery:
    """What one reading of the log hands out, to whom `channels_of` names."""

    def __init__(self, channels_of: Callable[[str], Sequence[TokenChannel]], counters: ReaderCounters) -> None:
        self._channels_of = channels_of
        self._counters = counters
        self._decoder: Decoder[Any] = Decoder(LogMessage)
        self._ended: dict[str, None] = {}
        """Ended requests whose channels wait for the final record."""
        self.steps: dict[str, int] = {}
        """Steps by worker, for whoever empties it."""

    def apply(self, entry: Entry, follower: StepLogFollower) -> bool:
        """Hand the entry's news to the channels; whether tokens of some request are missing."""
        self._counters.entries += 1
        try:
            message: LogMessage = self._decoder.decode(entry.payload)
            if isinstance(message, StepResult):
                self.steps[message.worker] = self.steps.get(message.worker, 0) + 1
            updates = follower.apply(message)
        except ProtocolError as error:
            # If it was a step, the next one of its worker shows a gap; anything else concerns nobody here.
            self._counters.unreadable += 1
            logger.warning("step log: entry %s skipped: %s", entry.entry_id, type(error).__name__)
            return False
        missing = False
        for update in updates:
            for channel in self._channels_of(update.request_id):
                if channel.ending is None:
                    missing = self._deliver(channel, update) or missing
        return missing

    def _deliver(self, channel: TokenChannel, update: Update) -> bool:
        channel.num_cached_tokens = update.num_cached_tokens or channel.num_cached_tokens
        if update.tokens:
            channel.last_news = now()
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
        channel.withdraw(event.num_output_tokens)
        channel.end(Ending.from_event(event))
        return False

    async def end_with_records(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        """Hand out the records of requests whose terminal event was read: event and record are one commit.

        Raises:
            RedisFailure: Redis did not answer; those that are due stay so.
        """
        for request_id, record in (await read_records(client, keys, list(self._ended))).items():
            self._ended.pop(request_id, None)
            for channel in self._channels_of(request_id):
                if record is not None and record.final is not None:
                    channel.end_with(record)
                else:
                    channel.end(Ending.failure("request_lost", "the request's record is gone"))
