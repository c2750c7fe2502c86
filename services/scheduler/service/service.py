"""A scheduler process: wait for leadership, take over where the last leader stopped, lead, and again."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.saved import UnusableSnapshot
from services.scheduler.recording.recorder import Recorder, RecorderLimits
from services.scheduler.service import logs
from services.scheduler.service.cold_start import fence_all, rebuild
from services.scheduler.service.committer import Committer, PlanRefused
from services.scheduler.service.inbox import Inbox
from services.scheduler.service.leader import MAX_BLOCK_S, Leader, LeaderParts
from services.scheduler.service.leadership import Leadership
from services.scheduler.service.position import Position, Snapshot, read_snapshot
from services.scheduler.service.queue_counts import LimitsWriter, queue_base
from services.scheduler.service.replay import ReplayFailed, open_follower
from services.scheduler.service.standby import Standby
from services.scheduler.service.trimmer import Incarnation
from services.scheduler.service.workers import SERVICE as WORKER_SERVICE
from services.scheduler.service.workers import Requirements, WorkerDirectory, note_numbers
from services.scheduler.settings import Settings
from shared.errors import Fenced, ProtocolError
from shared.fault_points import FaultPoint, pass_point
from shared.keys import Keys
from shared.leases import read_members
from shared.messages import IntakeMessage, Lease, WorkerState
from shared.redis_client import RedisFailure, connect, open_channel_blocking
from shared.scripts import FenceState, read_fence

FOLLOW_INTERVAL_S = 0.1
"""A standby looks this often whether it may lead, and what was committed meanwhile."""
ACQUIRE_INTERVAL_S = 0.25
RECENT = 16
"""Incarnations whose streams an earlier leader may have left; those of older ones have expired."""
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class _Start:
    """What a new leader starts with."""

    position: Position
    backlog: list[IntakeMessage]
    ended_holders: list[str]


class SchedulerService:
    """Composes a leader from Redis, settings and clocks."""

    def __init__(
        self,
        settings: Settings,
        lease: Lease,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._keys = Keys(settings.pool)
        self._wall = wall
        self._clock = clock
        self._must_start_cold = False
        self._client = connect(settings.redis_url)
        self._channel = open_channel_blocking(settings.redis_url, block_s=MAX_BLOCK_S)
        self._recorder = _recorder(settings)
        self._leadership = Leadership(settings.redis_url, self._keys, lease, ttl_s=settings.lease_ttl_s)
        self._numbers: dict[str, int] = {}
        """The highest incarnation of each worker that this process knows: Redis may forget some, and then none of them
        is given again."""
        self._standby = Standby(self._client, self._keys, settings, self._numbers, clock)

    def run(self, stop: threading.Event, on_ready: Callable[[bool], None] = lambda ready: None) -> None:
        """Serve until `stop` is set: as the leader if the lease is free, else standing by. Either is told as ready."""
        while not stop.is_set():
            try:
                leader = self.take_over(stop, on_standby=lambda: on_ready(True))
                if leader is not None:
                    on_ready(True)
                    self._lead(leader, stop)
            except Fenced as error:
                logs.warning("leadership_lost", epoch=self._leadership.epoch, reason=str(error))
            except PlanRefused as error:
                logs.warning("plan_refused", error=str(error))
                self._must_start_cold = True  # with new incarnations, whose plan streams are new
            except RedisFailure as error:
                logs.warning("redis_unavailable", error=str(error))
                stop.wait(BACKOFF_S[-1])
            finally:
                on_ready(False)
                if self._recorder is not None:
                    self._recorder.discard()
                self._leadership.resign()

    def close(self) -> None:
        """Drop leadership without giving the lease back, and all connections."""
        self._leadership.close()
        if self._recorder is not None:
            self._recorder.discard()
            self._recorder.close()
        self._client.close()
        self._channel.close()

    # ------------------------------------------------------------ leading

    def take_over(self, stop: threading.Event, on_standby: Callable[[], None] = lambda: None) -> Leader | None:
        """A leader under a fresh epoch; None if `stop` was set first. `on_standby`: called if another one leads.

        Raises:
            Fenced: another instance took over meanwhile.
            RedisFailure: Redis did not answer.
        """
        is_first = True
        while not self._leadership.try_acquire(self._standby.epoch):
            self._standby.follow()
            if is_first:
                on_standby()
                is_first = False
            if stop.wait(FOLLOW_INTERVAL_S):
                return None
        logs.info("leading", epoch=self._leadership.epoch)
        pass_point(FaultPoint.EPOCH_ACQUIRED)
        start = self._hot() or self._from_snapshot(stop)
        return None if start is None else self._compose(start)

    def _lead(self, leader: Leader, stop: threading.Event) -> None:
        failures = 0
        while not stop.is_set():
            try:
                leader.turn(MAX_BLOCK_S)
                failures = 0
            except RedisFailure as error:
                if failures == 0:
                    logs.warning("redis_unavailable", error=str(error))
                stop.wait(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                failures += 1
        try:
            leader.finish()
            self._leadership.release()
            logs.info("resigned", tick=leader.position.tick)
        except RedisFailure as error:
            logs.warning("not_saved", error=str(error))

    # ------------------------------------------------------------ taking over

    def _compose(self, start: _Start) -> Leader:
        client, keys, epoch = self._client, self._keys, self._leadership.epoch
        pass_point(FaultPoint.TICKS_REPLAYED)
        position, lanes = start.position, {w: lane.incarnation for w, lane in start.position.core.lanes.items()}
        config = position.core.config
        base_requests, base_tokens = queue_base(client, keys, position)
        parts = LeaderParts(
            client=client,
            keys=keys,
            settings=self._settings,
            leadership=self._leadership,
            position=position,
            inbox=Inbox(self._channel, client, keys, log_id=position.log_id, intake_id=position.intake_id),
            committer=Committer(self._channel, keys, epoch=epoch),
            workers=WorkerDirectory(
                client,
                keys,
                epoch=epoch,
                requirements=Requirements(config.block_size, config.max_model_len, config.max_num_seqs),
                joined=lanes,
                ended=start.ended_holders,
                numbers=self._numbers,
                clock=self._clock,
            ),
            limits=LimitsWriter(keys, self._settings, base_requests=base_requests, base_tokens=base_tokens),
            backlog=start.backlog,
            old_streams=old_streams(self._fence(), lanes),
            recorder=self._recorder,
        )
        return Leader(parts, wall=self._wall, clock=self._clock)

    def _hot(self) -> _Start | None:
        """From where this process followed the last leader to."""
        position = None if self._must_start_cold else self._standby.take(self._fence())
        return None if position is None else _Start(position, [], [])

    def _from_snapshot(self, stop: threading.Event) -> _Start | None:
        """From the snapshot, if it and all ticks after it can be derived again, else cold; None if `stop` was set."""
        snapshot = read_snapshot(self._client, self._keys)
        max_model_len = self._max_model_len(snapshot, stop)
        if max_model_len == 0:
            return None
        config = self._settings.core_config(max_model_len)
        return self._warm(snapshot, config) or self._cold(config)

    def _warm(self, snapshot: Snapshot | None, config: SchedulerConfig) -> _Start | None:
        if snapshot is None or self._must_start_cold:
            return None
        client, keys, fence, recorder = self._client, self._keys, self._fence(), self._recorder
        try:
            follower = open_follower(client, keys, snapshot, config, epoch=fence.epoch, recorder=recorder)
            num_ticks = follower.follow()
            if follower.position.tick != fence.tick:
                raise ReplayFailed(f"the last tick is {fence.tick}, not {follower.position.tick}")
        except (ReplayFailed, UnusableSnapshot, ProtocolError) as error:
            logs.warning("snapshot_unusable", reason=str(error))
            return None
        if recorder is not None:
            recorder.on_commit()
        logs.info("ticks_replayed", snapshot_tick=snapshot.tick, num_ticks=num_ticks, tick=fence.tick)
        return _Start(follower.position, [], [])

    def _cold(self, config: SchedulerConfig) -> _Start:
        fence = self._fence()
        holders = fence_all(self._client, self._keys, fence, self._numbers)
        cold = rebuild(self._client, self._keys, config, tick=fence.tick, now=self._wall())
        self._must_start_cold = False
        if self._recorder is not None:
            position = cold.position
            self._recorder.begin(
                position.core, epoch=fence.epoch, tick=position.tick, now=position.now, cause="cold_start"
            )
        return _Start(cold.position, cold.intake, holders)

    def _fence(self) -> FenceState:
        fence = read_fence(self._client, self._keys)
        if fence.epoch != self._leadership.epoch:
            raise Fenced(f"epoch {self._leadership.epoch} is stale")
        note_numbers(self._numbers, fence)
        return fence

    def _max_model_len(self, snapshot: Snapshot | None, stop: threading.Event) -> int:
        """The setting, else what the pool had, else that of the first ready worker. 0 if `stop` was set first."""
        known = self._settings.max_model_len or (snapshot.max_model_len if snapshot is not None else 0)
        while not known and not stop.is_set():
            self._leadership.beat()
            if self._leadership.lost:
                raise Fenced("the leader's lease is another instance's")
            known = _model_len_of_first_worker(read_members(self._client, self._keys))
            if not known:
                stop.wait(ACQUIRE_INTERVAL_S)
        return known


def _recorder(settings: Settings) -> Recorder | None:
    if not settings.record:
        return None
    limits = RecorderLimits(file=settings.record_file_bytes, folder=settings.record_bytes)
    return Recorder(Path(settings.record), settings.pool, limits)


def _model_len_of_first_worker(members: Mapping[str, Lease | None]) -> int:
    for lease in members.values():
        if lease is not None and lease.service == WORKER_SERVICE and lease.state is WorkerState.READY:
            return lease.max_model_len
    return 0


def old_streams(fence: FenceState, lanes: Mapping[str, int]) -> list[Incarnation]:
    """Plan streams that earlier leaders may have left behind: incarnations that are neither current nor in the core."""
    return [
        stream
        for stream in (
            Incarnation(name, n)
            for name, state in fence.workers.items()
            for n in range(max(1, state.incarnation - RECENT), state.incarnation)
        )
        if lanes.get(stream.worker) != stream.number
    ]
