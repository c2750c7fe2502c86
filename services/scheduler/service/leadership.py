"""Who leads the pool: the leader's lease, renewed by a thread of its own, and the epoch that fences its commits."""

import threading
import time
from collections.abc import Callable

import redis

from services.scheduler.service import logs
from shared.keys import Keys
from shared.leases import decode_lease
from shared.messages import Lease
from shared.redis_client import RedisFailure, connect
from shared.scripts import acquire

MAX_SILENCE_S = 15.0
"""A leader whose loop made no turn for this long stops renewing: a heartbeat must not hide a hung loop."""


class Leadership:
    """One instance's claim to lead. The lease only tells others when to try; the epoch decides."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        lease: Lease,
        *,
        ttl_s: float = 2.0,
        max_silence_s: float = MAX_SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = connect(url, timeout_s=max(ttl_s / 2, 0.2))
        self._keys = keys
        self._lease = lease
        self._ttl_s = ttl_s
        self._max_silence_s = max_silence_s
        self._clock = clock
        self._last_beat = clock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.epoch = 0
        self._highest = 0
        self.lost = False
        """Somebody else leads: whatever is committed from now on is refused."""

    def try_acquire(self, highest: int = 0) -> bool:
        """Take the lease if it is free, and renew it from then on. The epoch will be above `highest`, and above all
        that this instance ever had.

        Raises:
            RedisFailure: Redis did not answer.
        """
        self._highest = max(self._highest, highest)
        self.epoch = self._acquire(held=0)
        if self.epoch == 0:
            return False
        self._highest = self.epoch
        self.lost = False
        self.beat()
        self._end.clear()
        self._thread = threading.Thread(target=self._renew, name="leadership", daemon=True)
        self._thread.start()
        return True

    def beat(self) -> None:
        """The loop says that it turns."""
        self._last_beat = self._clock()

    def resign(self) -> None:
        """Stop renewing; the lease lapses by itself."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def release(self) -> None:
        """Stop renewing and give the lease back, so that a successor need not wait."""
        self.resign()
        try:
            self._delete_own_lease()
        except RedisFailure as error:
            logs.warning("lease_not_released", error=str(error))

    def close(self) -> None:
        self.resign()
        self._client.close()

    def _acquire(self, *, held: int) -> int:
        return acquire(
            self._client,
            self._keys,
            instance=self._lease.instance,
            ttl_ms=int(self._ttl_s * 1000),
            lease=self._lease,
            held=held,
            highest=self._highest,
        )

    def _renew(self) -> None:
        while not self._end.wait(self._ttl_s / 4):
            if self._clock() - self._last_beat > self._max_silence_s:
                continue
            try:
                if self._acquire(held=self.epoch) == self.epoch:
                    continue
            except RedisFailure:
                continue  # the fence decides whether somebody else took over meanwhile
            self.lost = True
            return

    def _delete_own_lease(self) -> None:
        key = self._keys.leader_lease
        with self._client.pipeline() as pipe:
            pipe.watch(key)  # type: ignore[no-untyped-call]
            held = decode_lease(pipe.get(key))  # type: ignore[arg-type]
            if held is None or held.instance != self._lease.instance:
                return
            pipe.multi()
            pipe.delete(key)
            try:
                pipe.execute()
            except redis.WatchError:
                return  # somebody else's by now
