"""A worker's life: register, load, become ready, serve one incarnation after another, drain."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import redis

from services.gpu_worker.service.backoff import delays
from services.gpu_worker.service.incarnation import Ending, Incarnation, StepEngine
from services.gpu_worker.service.seat import Seat, find_seat
from shared.keys import Keys
from shared.leases import LeaseKeeper
from shared.messages import Lease, WorkerState
from shared.redis_client import RedisFailure, connect

log = logging.getLogger(__name__)

_SEAT_POLL_S = 0.05
ADMISSION_PATIENCE_S = 10.0
"""A leader admits a worker within a second: after so long people are told."""
SERVICE = "gpu_worker"


class ResettableEngine(StepEngine, Protocol):
    """An engine that outlives an incarnation."""

    def reset(self) -> None:
        """Forget every row."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the worker tells the leader, as in `Lease`."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    fingerprint: str
    model: str
    num_cpu_blocks: int
    block_bytes: int
    warning: str = ""


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """An engine that is warmed up, and what it can do."""

    engine: ResettableEngine
    capacity: Capacity


LoadProgress = Callable[[float], None]
"""Called with the loaded share, 0 to 1."""


class Worker:
    """One worker process. `run` is called by the compute thread, everything else by the main thread."""

    def __init__(self, url: str, keys: Keys, *, name: str, instance: str, drain_grace_s: float) -> None:
        self._url = url
        self._keys = keys
        self._first_instance = instance
        self._drain_grace_s = drain_grace_s
        self.on_stuck: Callable[[], None] = lambda: None
        """Called by a thread of its own if a step of a fenced incarnation does not end."""
        self._draining = threading.Event()
        self._num_fenced = 0
        self._is_loaded = False
        self._refresh: Callable[[], Mapping[str, Any]] = dict
        """What each renewal of the lease tells anew."""
        self._lock = threading.Lock()
        """Guards `_keeper`, which both threads use and the compute thread replaces."""
        self._keeper = LeaseKeeper(url, keys, Lease(SERVICE, name, instance, os.getpid(), WorkerState.LOADING))

    @property
    def is_loaded(self) -> bool:
        """Whether `drain` ends `run` in an orderly way; loading cannot be interrupted."""
        return self._is_loaded

    def register(self) -> None:
        """Say that it lives. Before `run`."""
        self._keeper.start()

    def drain(self) -> None:
        """End soon: take nothing new; the leader moves requests elsewhere or lets them end here, then lets go."""
        self._draining.set()
        self._tell(state=WorkerState.DRAINING)

    def release(self) -> None:
        """Give the lease back, so that nobody waits for it to lapse."""
        with self._lock:
            self._keeper.stop()

    def run(self, load: Callable[[LoadProgress], LoadedWorker]) -> None:
        """Load, then serve until drained.

        Raises:
            ConfigError: the model cannot be loaded.
            IncarnationFailed: see `Incarnation.serve`.
        """
        loaded = load(lambda share: self._tell(progress=share))
        self._is_loaded = True
        self._refresh = lambda: {"step_times": loaded.engine.profile.told()}
        self._announce(loaded.capacity)
        client = connect(self._url)
        while (seat := self._await_seat(client)) is not None:
            log.info("%s: incarnation %d starts", seat.worker, seat.incarnation)
            incarnation = Incarnation(
                loaded.engine,
                self._url,
                seat,
                draining=self._draining,
                drain_grace_s=self._drain_grace_s,
                on_stuck=self.on_stuck,
            )
            if incarnation.serve() is Ending.DRAINED or self._draining.is_set():
                break
            loaded.engine.reset()
            self._register_anew()
        client.close()

    def _tell(self, **changes: Any) -> None:
        with self._lock:
            self._keeper.update(**changes)

    def _register_anew(self) -> None:
        """The old instance is out: whatever it still might send is refused. Come back as `<first instance>.<k>`."""
        self._num_fenced += 1
        with self._lock:
            old = self._keeper
            old.stop()
            lease = msgspec.structs.replace(old.lease, instance=f"{self._first_instance}.{self._num_fenced}")
            self._keeper = LeaseKeeper(self._url, self._keys, lease)
            self._keeper.refresh = self._refresh
            self._keeper.start()
        log.warning("%s was fenced and registers again as %s", lease.name, lease.instance)

    def _announce(self, capacity: Capacity) -> None:
        self._keeper.refresh = self._refresh
        self._tell(
            state=WorkerState.DRAINING if self._draining.is_set() else WorkerState.READY,
            progress=1.0,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            max_model_len=capacity.max_model_len,
            max_num_seqs=capacity.max_num_seqs,
            fingerprint=capacity.fingerprint,
            model=capacity.model,
            num_cpu_blocks=capacity.num_cpu_blocks,
            block_bytes=capacity.block_bytes,
            warning=capacity.warning,
        )

    def _await_seat(self, client: redis.Redis) -> Seat | None:
        """Wait until the leader names this instance in the fence; None once draining."""
        lease = self._keeper.lease
        waits, told_at = delays(), time.monotonic() + ADMISSION_PATIENCE_S
        while not self._draining.is_set():
            pause = _SEAT_POLL_S
            if time.monotonic() > told_at:
                log.warning(
                    "%s: not admitted yet: no scheduler leads, or its log says worker_refused and why", lease.name
                )
                told_at = math.inf
            try:
                seat = find_seat(client, self._keys, lease.name, lease.instance)
            except RedisFailure as error:
                seat, pause = None, next(waits)
                log.warning("cannot read the fence: %s", error)
            if seat is not None:
                return seat
            self._draining.wait(pause)
        return None
