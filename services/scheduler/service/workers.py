"""Which workers serve: leases in, fences and worker events out.

A seat (`worker-0`) has one holder at a time, named in the fence. A holder is fenced when its lease lapsed or a
supervisor saw it die. A ready process that never held the seat gets it when it is free: first the fence moves
(`fence_worker`), then the `WorkerFenced` entry of the incarnation before is read back from the log, and only then a
tick may carry `WorkerJoined`: by then everything that the old incarnation published has been applied.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import redis

from services.scheduler.service import logs
from shared.capacity import MAX_BLOCKS
from shared.errors import Fenced
from shared.fault_points import FaultPoint, pass_point
from shared.keys import Keys
from shared.leases import forget_members, read_members
from shared.messages import Lease, WorkerDraining, WorkerEvent, WorkerFenced, WorkerJoined, WorkerState
from shared.scripts import FenceState, fence_worker, forget_workers, read_fence

SERVICE = "gpu_worker"
FORGET_AFTER_S = 60.0
"""A name whose lease lapsed is kept this long among the members."""
BLIND_AFTER_S = 1.0
"""If the leases were not looked at for this long, the leader or Redis had stopped, and with them the renewals …"""
SIGHT_AFTER_S = 1.0
"""… so a missing lease proves nothing before everybody had this long to renew."""
MOST_VACANT = 64
"""Seats that are kept although nobody holds or wants them. Containers get new names all the time."""
FORGOTTEN = ""
"""In the numbers: the highest incarnation of all workers that the fence has forgotten."""
REMEMBERED = 1000
"""Ended instances that are remembered."""


def note_numbers(numbers: dict[str, int], fence: FenceState) -> None:
    """Bring the highest known incarnations up to the fence."""
    forget_numbers(numbers, fence.forgotten, [w for w in numbers if w != FORGOTTEN and w not in fence.workers])
    for worker, state in fence.workers.items():
        numbers[worker] = max(state.incarnation, numbers.get(worker, 0))


def forget_numbers(numbers: dict[str, int], forgotten: int, workers: Iterable[str]) -> None:
    """All incarnations up to `forgotten` are over: one number stands for those of these workers that are no higher."""
    numbers[FORGOTTEN] = max(forgotten, numbers.get(FORGOTTEN, 0))
    for worker in workers:
        if numbers.get(worker, 0) <= numbers[FORGOTTEN]:
            numbers.pop(worker, None)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a worker must have been started with, to be admitted."""

    block_size: int
    max_model_len: int
    max_num_seqs: int

    def objection(self, lease: Lease) -> str:
        """Why the worker cannot serve, or an empty string."""
        if lease.block_size != self.block_size:
            return f"block_size is {lease.block_size}, the scheduler's is {self.block_size}"
        if lease.max_model_len != self.max_model_len:
            return f"max_model_len is {lease.max_model_len}, the scheduler's is {self.max_model_len}"
        if lease.max_num_seqs < self.max_num_seqs:
            return f"max_num_seqs is {lease.max_num_seqs}, the scheduler's is {self.max_num_seqs}"
        if lease.num_blocks < 1:
            return "it has no blocks"
        if lease.num_blocks > MAX_BLOCKS:
            return f"num_blocks is {lease.num_blocks}, at most {MAX_BLOCKS}"
        if not 0 <= lease.num_cpu_blocks <= MAX_BLOCKS:
            return f"num_cpu_blocks is {lease.num_cpu_blocks}, at most {MAX_BLOCKS}"
        if lease.block_bytes < 0:
            return f"block_bytes is {lease.block_bytes}"
        return ""


def _succeeds(instance: str, holder: str) -> bool:
    """Whether `instance` is a later name of the process that was `holder`: then nobody is left under that one."""
    process, _, number = instance.rpartition(".")
    before = 0 if holder == process else _number_of(holder, process)
    return number.isdigit() and 0 <= before < int(number)


def _number_of(instance: str, process: str) -> int:
    """k of `<process>.<k>`; -1 if it is none."""
    number = instance.removeprefix(f"{process}.")
    return int(number) if number.isdigit() and number != instance else -1


@dataclass(slots=True)
class _Seat:
    """The fence's view of one worker, and how far this leader is with it."""

    incarnation: int
    holder: str
    joined: bool = False
    draining: bool = False


@dataclass(slots=True)
class _Names:
    """A set that remembers the most recent names only."""

    names: dict[str, None] = field(default_factory=dict)

    def add(self, name: str) -> None:
        self.names[name] = None
        while len(self.names) > REMEMBERED:
            del self.names[next(iter(self.names))]

    def __contains__(self, name: str) -> bool:
        return name in self.names


class WorkerDirectory:
    """The leader's view of the workers. Methods that ask Redis may raise RedisFailure and may then be repeated."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        epoch: int,
        requirements: Requirements,
        joined: Mapping[str, int],
        ended: Iterable[str] = (),
        numbers: dict[str, int],
        clock: Callable[[], float],
    ) -> None:
        """`joined`: incarnation of each worker that the core already has. `ended`: instances that were fenced.
        `numbers`: the highest incarnation of each worker that the process knows, kept up here."""
        self._client = client
        self._keys = keys
        self._epoch = epoch
        self._requirements = requirements
        self._numbers = numbers
        self._clock = clock
        self._seats: dict[str, _Seat] = {}
        self._was_joined = dict(joined)
        self._fenced: dict[str, int] = {}
        """Highest incarnation of each worker whose `WorkerFenced` was read."""
        self._ended = _Names(dict.fromkeys(ended))
        """Instances that were fenced: they come back as `<instance>.<k>`."""
        self._died = _Names()
        """Instances whose process is gone: they do not come back, under no such name."""
        self._said = _Names()
        self._lapsed_since: dict[str, float] = {}
        self._last_poll = float("-inf")
        self._sight_from = float("-inf")
        self._view_is_stale = True

    def on_fenced(self, entry: WorkerFenced) -> None:
        """The log says that an incarnation ended."""
        self._fenced[entry.worker] = max(entry.incarnation, self._fenced.get(entry.worker, -1))

    def on_died(self, instance: str) -> None:
        """A supervisor saw the process end: fence it without waiting for its lease."""
        self._died.add(instance)
        self._refresh()
        for worker, seat in self._seats.items():
            if seat.holder and self._has_died(seat.holder):
                self._fence(worker, "", "process_died")

    def on_broken(self, worker: str, incarnation: int) -> None:
        """The worker published a result that contradicts its plan: nothing it says is believed any more."""
        self._end(worker, incarnation, "result_contradicts_plan")

    def on_drained(self, worker: str, incarnation: int) -> None:
        """Nothing is left on a draining worker: its process may go, which waits for this."""
        self._end(worker, incarnation, "drained")

    def on_overdue(self, worker: str, incarnation: int) -> None:
        """Its step should have ended long ago, though its process says that it lives."""
        self._end(worker, incarnation, "step_deadline")

    def _end(self, worker: str, incarnation: int, reason: str) -> None:
        self._refresh()
        seat = self._seats.get(worker)
        if seat is not None and seat.incarnation == incarnation:
            self._fence(worker, "", reason)

    def poll(self) -> list[WorkerEvent]:
        """Look at the leases; fence and admit. Answers the events that the next tick must carry.

        At the first call the step log must have been read to its end, as far as earlier leaders wrote it.

        Raises:
            Fenced: the epoch is stale.
        """
        now = self._clock()
        if now - self._last_poll > BLIND_AFTER_S:
            self._sight_from = now + SIGHT_AFTER_S
        members = read_members(self._client, self._keys)
        self._last_poll = now
        self._refresh()
        self._forget(members, now)
        leases = [x for x in members.values() if x is not None and self._counts(x)]
        if now >= self._sight_from:
            self._fence_lapsed({lease.instance for lease in leases})
        self._admit(leases)
        self._forget_vacant({lease.name for lease in leases})
        return self._events({lease.instance: lease for lease in leases})

    def _counts(self, lease: Lease) -> bool:
        return lease.service == SERVICE and lease.instance not in self._ended and not self._has_died(lease.instance)

    def _has_died(self, instance: str) -> bool:
        return instance in self._died or instance.rpartition(".")[0] in self._died

    # ------------------------------------------------------------ fencing

    def _fence_lapsed(self, alive: set[str]) -> None:
        for worker, seat in self._seats.items():
            if seat.holder and seat.holder not in alive:
                self._fence(worker, "", "lease_lapsed")

    def _admit(self, ready: list[Lease]) -> None:
        for lease in ready:
            seat = self._seats.setdefault(lease.name, _Seat(0, ""))
            if lease.state is not WorkerState.READY or lease.instance == seat.holder:
                continue
            is_taken = bool(seat.holder) and not _succeeds(lease.instance, seat.holder)
            objection = self._requirements.objection(lease) or ("its seat is taken" if is_taken else "")
            if objection:
                self._say(lease, objection)
            else:
                self._fence(lease.name, lease.instance, "admitted")

    def _fence(self, worker: str, new_holder: str, reason: str) -> None:
        seat = self._seats[worker]
        self._view_is_stale = True
        incarnation = fence_worker(
            self._client,
            self._keys,
            epoch=self._epoch,
            worker=worker,
            expected=seat.incarnation,
            new_holder=new_holder,
            reason=reason,
            highest=self._numbers.get(worker, self._numbers.get(FORGOTTEN, 0)),
        )
        pass_point(FaultPoint.WORKER_FENCED)
        if incarnation == 0:
            raise Fenced(f"epoch {self._epoch} is stale")
        if incarnation < 0:
            return  # an earlier try landed; the next refresh reads it
        if seat.holder:
            self._ended.add(seat.holder)
        self._seats[worker] = _Seat(incarnation, new_holder)
        self._numbers[worker] = incarnation
        self._view_is_stale = False
        logs.info("worker_fenced", worker=worker, incarnation=incarnation - 1, new_holder=new_holder, reason=reason)

    def _forget_vacant(self, wanted: set[str]) -> None:
        """Of the seats that nobody holds, and that no process is there for, only the last ones stay."""
        vacant = [worker for worker, seat in self._seats.items() if not seat.holder and worker not in wanted]
        old = {worker: self._seats[worker].incarnation for worker in vacant[:-MOST_VACANT]}
        if not old or self._view_is_stale:
            return
        if not forget_workers(self._client, self._keys, epoch=self._epoch, incarnations=old):
            raise Fenced(f"epoch {self._epoch} is stale")
        forget_numbers(self._numbers, max(old.values()), old)
        for worker in old:
            del self._seats[worker]
            self._fenced.pop(worker, None)
        logs.info("workers_forgotten", num_workers=len(old))

    def _refresh(self) -> None:
        """Read the fence at first, and after a call whose reply was lost."""
        if not self._view_is_stale:
            return
        fence = read_fence(self._client, self._keys)
        if fence.epoch != self._epoch:
            raise Fenced(f"epoch {self._epoch} is stale")
        note_numbers(self._numbers, fence)
        for worker, state in fence.workers.items():
            known = self._seats.get(worker)
            if known is None:
                joined = self._was_joined.get(worker) == state.incarnation
                self._seats[worker] = _Seat(state.incarnation, state.holder, joined=joined)
                self._fenced[worker] = state.incarnation - 1
            elif known.incarnation != state.incarnation:
                if known.holder:
                    self._ended.add(known.holder)
                self._seats[worker] = _Seat(state.incarnation, state.holder)
        self._view_is_stale = False

    # ------------------------------------------------------------ events

    def _events(self, leases: Mapping[str, Lease]) -> list[WorkerEvent]:
        events: list[WorkerEvent] = []
        for worker, seat in self._seats.items():
            lease = leases.get(seat.holder)
            if lease is None or self._fenced.get(worker, -1) < seat.incarnation - 1:
                continue
            if not seat.joined and lease.state is WorkerState.READY:
                seat.joined = True
                events.append(
                    WorkerJoined(
                        worker=worker,
                        incarnation=seat.incarnation,
                        num_blocks=lease.num_blocks,
                        num_cpu_blocks=lease.num_cpu_blocks,
                        block_bytes=lease.block_bytes,
                        fingerprint=lease.fingerprint,
                    )
                )
                logs.info("worker_joined", worker=worker, incarnation=seat.incarnation, num_blocks=lease.num_blocks)
            if seat.joined and lease.state is WorkerState.DRAINING and not seat.draining:
                seat.draining = True
                events.append(WorkerDraining(worker=worker, incarnation=seat.incarnation))
                logs.info("worker_draining", worker=worker, incarnation=seat.incarnation)
        return events

    def _say(self, lease: Lease, objection: str) -> None:
        """Once per process, not at every poll."""
        key = f"{lease.instance} {objection}"
        if key not in self._said:
            self._said.add(key)
            logs.warning("worker_refused", worker=lease.name, instance=lease.instance, reason=objection)

    def _forget(self, members: Mapping[str, Lease | None], now: float) -> None:
        for name, lease in members.items():
            if lease is not None:
                self._lapsed_since.pop(name, None)
            else:
                self._lapsed_since.setdefault(name, now)
        old = [name for name, since in self._lapsed_since.items() if now - since > FORGET_AFTER_S]
        forget_members(self._client, self._keys, old)
        for name in old:
            del self._lapsed_since[name]
