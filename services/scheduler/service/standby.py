"""Hot standby: while another scheduler leads, its ticks are applied here, so that taking over costs next to nothing.

Heat is all that can be lost here. Whatever goes wrong (a tick that was trimmed away, another leader, a Redis that lost
its last second), the position is dropped, and the next snapshot is the next beginning.
"""

import time
from collections.abc import Callable

import redis

from services.scheduler.core.saved import UnusableSnapshot
from services.scheduler.service import logs
from services.scheduler.service.position import Position, read_snapshot
from services.scheduler.service.replay import Follower, ReplayFailed, open_follower
from services.scheduler.service.workers import note_numbers
from services.scheduler.settings import Settings
from shared.errors import ProtocolError
from shared.keys import Keys
from shared.scripts import FenceState, read_fence

REOPEN_S = 1.0
"""A snapshot that was of no use is not tried again at once: the leader writes another about every second."""


class Standby:
    """The position of the leader whom this process waits for, as far as there is one."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        settings: Settings,
        numbers: dict[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`numbers`: the highest incarnations that are known, as in `WorkerDirectory`."""
        self._client, self._keys, self._settings, self._clock = client, keys, settings, clock
        self._numbers = numbers
        self._follower: Follower | None = None
        self._reopen_at = 0.0
        self.epoch = 0
        """The highest that was seen."""
        self._followed = 0
        """The epoch of whom it follows."""

    def follow(self) -> None:
        """Come up to the last committed tick.

        Raises:
            RedisFailure: Redis did not answer; call again.
        """
        fence = read_fence(self._client, self._keys)
        self.epoch = max(self.epoch, fence.epoch)
        note_numbers(self._numbers, fence)
        if self._settings.record:
            return  # a new leader opens the snapshot then in any case: what it records must have no gap
        try:
            if self._follower is None:
                self._open(fence)
            else:
                self._check(fence)
                self._follower.follow()
        except (ReplayFailed, UnusableSnapshot, ProtocolError) as error:
            self._drop(error)

    def take(self, fence: FenceState) -> Position | None:
        """The position at the last committed tick, for who acquired the epoch of `fence`; None if it is not known.

        Raises:
            RedisFailure: Redis did not answer; this standby has lost its position.
        """
        follower, self._follower = self._follower, None
        if follower is None:
            return None
        try:
            if fence.epoch != self._followed + 1:
                raise ReplayFailed(f"epoch {self._followed} is not the one before {fence.epoch}")
            num_ticks = follower.follow()
            if follower.position.tick != fence.tick:
                raise ReplayFailed(f"the last tick is {fence.tick}, not {follower.position.tick}")
        except (ReplayFailed, ProtocolError) as error:
            self._drop(error)
            return None
        logs.info("took_over_hot", num_ticks=num_ticks, tick=fence.tick)
        return follower.position

    def _open(self, fence: FenceState) -> None:
        if self._clock() < self._reopen_at:
            return
        self._reopen_at = self._clock() + REOPEN_S
        snapshot = read_snapshot(self._client, self._keys)
        if snapshot is None:
            return
        config = self._settings.core_config(self._settings.max_model_len or snapshot.max_model_len)
        follower = open_follower(self._client, self._keys, snapshot, config)
        follower.follow()
        self._follower, self._followed = follower, fence.epoch
        logs.info("following", epoch=fence.epoch, tick=follower.position.tick)

    def _check(self, fence: FenceState) -> None:
        """Ticks that another leader, or a Redis with an older state, has in store are not those that follow here."""
        assert self._follower is not None
        if fence.epoch != self._followed or fence.tick < self._follower.position.tick:
            raise ReplayFailed(f"epoch {self._followed} is over")

    def _drop(self, error: Exception) -> None:
        self._follower = None
        logs.info("standby_begins_anew", reason=str(error))
