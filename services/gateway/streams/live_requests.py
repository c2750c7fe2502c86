"""The requests that this process follows, and the place in the step log where their follower stands."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.gateway.streams.channel import Ending, TokenChannel
from shared.records import Seat
from shared.step_log import StepLogFollower
from shared.streams import START


@dataclass(slots=True)
class ReaderCounters:
    """What the reader met."""

    entries: int = 0
    unreadable: int = 0
    rebuilds: int = 0
    losses: int = 0
    """Times at which the log was not the one that had been read."""
    adoptions: int = 0
    """Each of any number of requests."""
    failures: int = 0


class LiveRequests:
    """Channels by request. `follower` and all channels have what the log says up to `position`."""

    def __init__(self) -> None:
        self._channels: dict[str, list[TokenChannel]] = {}
        """A request may be read by several clients."""
        self.follower = StepLogFollower()
        self.position = START
        self.at_rest = asyncio.Lock()
        """Held while the position moves, or must not."""
        self.rebuild_due = False
        """The follower lacks rows or tokens: all requests are to be resumed from their records."""
        self.counters = ReaderCounters()

    def __len__(self) -> int:
        return sum(map(len, self._channels.values()))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._channels

    @property
    def request_ids(self) -> Iterable[str]:
        return self._channels

    @property
    def channels(self) -> list[TokenChannel]:
        return [channel for channels in self._channels.values() for channel in channels]

    def channels_of(self, request_id: str) -> Sequence[TokenChannel]:
        return self._channels.get(request_id, ())

    def add(self, channel: TokenChannel, committed: int = 0, seat: Seat | None = None) -> None:
        """Follow a request; `committed` and `seat` are its place in the log here, if nobody follows it yet."""
        channel.last_news = now()
        channels = self._channels.setdefault(channel.request_id, [])
        channels.append(channel)
        if len(channels) == 1:
            self.follower.track(channel.request_id, committed, seat)

    def remove(self, channel: TokenChannel) -> None:
        """Forget a request: its response is complete or gone."""
        channels = self._channels.get(channel.request_id, [])
        if channel in channels:
            channels.remove(channel)
            if not channels:
                del self._channels[channel.request_id]
                self.follower.untrack(channel.request_id)

    def fail_all(self, code: str, message: str) -> None:
        """End every live request with one error."""
        for channel in self.channels:
            channel.end(Ending.failure(code, message))


def now() -> float:
    """The event loop's time, which `TokenChannel.last_news` counts by."""
    return asyncio.get_running_loop().time()
