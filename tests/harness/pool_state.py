"""What Redis and the operating system say of a running stack: processes, fence, gauges, keys."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil
import redis

from services.cli.state_dir import SERVICES, ChildState, StateDir
from shared.keys import Keys
from shared.leases import decode_lease, read_members
from shared.messages import Decoder, Lease, PoolOverview, PoolStats, UsageRecord, WorkerState
from shared.redis_client import RedisFailure, connect
from shared.scripts import FenceState, read_fence
from shared.streams import START, scan
from tests.harness.stack import Stack

T = TypeVar("T")
_stats: Decoder[PoolStats] = Decoder(PoolStats)
_overview: Decoder[PoolOverview] = Decoder(PoolOverview)
_usage: Decoder[UsageRecord] = Decoder(UsageRecord)


def wait_for(what: str, find: Callable[[], T | None], seconds: float = 60.0, every_s: float = 0.01) -> T:
    """What `find` answers as soon as that is true; a Redis that is away is waited for. `every_s`: longer for what costs
    more, where streams that are timed need the cores.

    Raises:
        TimeoutError: says `what` did not come.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := find():
                return found
        except RedisFailure:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {seconds:g} s")
        time.sleep(every_s)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process holds."""

    name: str
    pid: int
    rss_bytes: int
    num_fds: int
    num_threads: int


class PoolState:
    """Answers about one stack, anew at each question."""

    def __init__(self, stack: Stack) -> None:
        self._state_dir = StateDir(stack.state_dir)
        self.keys: Keys = stack.keys
        self.client: redis.Redis = connect(stack.redis_url)

    def children(self, service: str) -> list[ChildState]:
        """The service's processes, by name."""
        state = self._state_dir.read()
        found = state.children if state else ()
        return sorted((c for c in found if c.service == service and c.is_alive), key=lambda c: c.name)

    def fence(self) -> FenceState:
        return read_fence(self.client, self.keys)

    def stats(self) -> PoolStats | None:
        """The leader's gauges; None while nobody leads."""
        data: bytes | None = self.client.get(self.keys.stats)  # type: ignore[assignment]
        return None if data is None else _stats.decode(data)

    def leader(self) -> Lease | None:
        """Whoever leads, supervised or not."""
        return decode_lease(self.client.get(self.keys.leader_lease))  # type: ignore[arg-type]

    def leading_child(self) -> ChildState | None:
        """The process of whoever leads."""
        leader = self.leader()
        return next((c for c in self.children("scheduler") if leader and c.pid == leader.pid), None)

    def are_ready(self, service: str) -> bool:
        """Whether every process of the service says so: a scheduler leads, or follows whoever does."""
        ready = {
            lease.pid
            for lease in read_members(self.client, self.keys).values()
            if lease is not None and lease.service == service and lease.state is WorkerState.READY
        }
        return all(child.pid in ready for child in self.children(service))

    def refused_writes(self, writer: str) -> int:
        """Late writes that the fence has refused so far: `tick` of leaders, `step` of workers."""
        fields: dict[bytes, bytes] = self.client.hgetall(self.keys.fence)  # type: ignore[assignment]
        return sum(int(count) for name, count in fields.items() if name.decode().startswith(f"refused:{writer}"))

    def num_serving(self) -> int:
        """Workers that the leader has."""
        stats = self.stats()
        return stats.num_workers if stats else 0

    def rows_by_worker(self) -> dict[str, int]:
        """Requests that run on each worker of the leader."""
        data: bytes | None = self.client.get(self.keys.overview)  # type: ignore[assignment]
        return {} if data is None else {worker.worker: worker.num_running for worker in _overview.decode(data).workers}

    def usage(self) -> list[UsageRecord]:
        """Every usage record so far."""
        return [record for _, record in self.usage_after(START)]

    def usage_after(self, entry_id: str) -> list[tuple[str, UsageRecord]]:
        """Usage records that came after one, with the ids of their entries."""
        found = scan(self.client, self.keys.usage, after=entry_id)
        return [(entry.entry_id, _usage.decode(entry.payload)) for entry in found]

    def keys_by_kind(self) -> dict[str, int]:
        """How many keys there are of each kind; request records that will expire are kinds of their own."""
        names = [name.decode() for name in self.client.scan_iter(count=1000)]
        with self.client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.ttl(name)
            ttls = pipe.execute()
        counts: Counter[str] = Counter()
        for name, ttl in zip(names, ttls, strict=True):
            counts[name.split(":")[2] + (" (expires)" if ttl >= 0 else "")] += 1
        return dict(sorted(counts.items()))

    def footprints(self) -> list[Footprint]:
        """Of every child."""
        return [self._footprint(child) for service in SERVICES for child in self.children(service)]

    def _footprint(self, child: ChildState) -> Footprint:
        process = psutil.Process(child.pid)
        with process.oneshot():
            return Footprint(child.name, child.pid, process.memory_info().rss, process.num_fds(), process.num_threads())

    def idle_fault(self) -> str:
        """Why the pool is not idle; empty if it is."""
        stats = self.stats()
        if stats is None:
            return "nobody leads"
        live = stats.num_requests_running + stats.num_requests_waiting + stats.num_requests_swapped
        used = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        host = stats.num_cpu_blocks - stats.num_free_cpu_blocks - stats.num_cached_cpu_blocks
        windows = int(self.client.zcard(self.keys.windows))
        found = {"live requests": live, "blocks in use": used, "host blocks in use": host, "open windows": windows}
        return ", ".join(f"{count} {name}" for name, count in found.items() if count)

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until the pool is idle, seen twice, further apart than the gauges are refreshed."""
        deadline, idle_since = time.monotonic() + seconds, 0.0
        while not idle_since or time.monotonic() - idle_since < 1.2:
            fault = self.idle_fault()
            idle_since = 0.0 if fault else idle_since or time.monotonic()
            if time.monotonic() > deadline:
                raise TimeoutError(f"not idle after {seconds:g} s: {fault}")
            time.sleep(0.1)

    def close(self) -> None:
        self.client.close()
