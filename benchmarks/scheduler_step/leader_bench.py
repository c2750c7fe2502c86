"""The leader with a real Redis: read, decide, commit, chores.

Redis is one of its own, configured as `pagewire up` does it (append-only file, Unix socket). Two measurements:

turn       Leader and workers share a process. What workers do lies outside the measured time, so a turn always finds
           its results in the log, or, as in life, already on the way: the read was sent with the commit before.
reaction   The leader has a process of its own, as in life. From before a worker publishes a result until it has read
           the plan that follows from it: the turn, and four ways through Redis. A worker that is a plan ahead does not
           wait for it.

Both wait for Redis in every turn, and a idle machine halts its cores meanwhile: waking them cost half
as much again on a virtual machine, in CPU time, too. In life a worker computes on them; here `awake_cores` does.

What was expected of one exchange with Redis per turn, and what it gave: infra/adr/0010.
"""

import gc
import itertools
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from benchmarks.report import Times, Value
from benchmarks.scheduler_step.bench_workers import BenchWorkers, pool_settings
from services.cli.redis_server import find_redis_server, prepare
from services.scheduler.service.leader import MAX_BLOCK_S
from services.scheduler.service.service import SchedulerService
from shared.messages import Lease, WorkerState
from tests.harness.own_redis import running

_pools = itertools.count()


@contextmanager
def own_redis() -> Iterator[str]:
    """URL of a Redis for this measurement."""
    with tempfile.TemporaryDirectory() as folder:
        own = prepare(Path(folder), find_redis_server())
        with running(own):
            yield own.url


@contextmanager
def awake_cores() -> Iterator[None]:
    """No core halts: each has a process that runs when nothing else would (Linux's SCHED_IDLE)."""
    context = multiprocessing.get_context("spawn")
    spinners = [context.Process(target=_spin, daemon=True) for _ in os.sched_getaffinity(0)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def _spin() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def _service(url: str, pool: str, num_rows: int) -> SchedulerService:
    lease = Lease("scheduler", "scheduler-0", f"bench-{pool}", 1, WorkerState.READY)
    return SchedulerService(pool_settings(url, pool, num_rows), lease)


# ---------------------------------------------------------------- a turn


class LeaderBench:
    """A pool in one process: `with LeaderBench(url, …) as bench`. Every worker has `num_rows` requests."""

    def __init__(self, url: str, *, num_rows: int, num_workers: int = 1) -> None:
        pool = f"bench-{next(_pools)}"
        self.workers = BenchWorkers(url, pool, num_rows=num_rows, num_workers=num_workers)
        self._service = _service(url, pool, num_rows)
        self.num_turns = 0
        """That the leader took for the last `rounds`."""

    def __enter__(self) -> Self:
        leader = self._service.take_over(threading.Event())
        assert leader is not None
        self.leader = leader
        self.workers.register()
        lanes = leader.position.core.lanes
        while len(lanes) < len(self.workers):
            leader.turn(0.01)
        assert self.workers.begin()
        self.workers.fill()
        self._settle()
        return self

    def __exit__(self, *_: object) -> None:
        with self.workers:
            self._service.close()

    def _settle(self) -> None:
        """Until everything decodes and every worker has its plans."""
        core = self.leader.position.core
        steady = 0
        while steady < 3:
            self.workers.step()
            self.leader.turn()
            is_settled = not len(core.waiting) and not any(lane.prefill for lane in core.lanes.values())
            steady = steady + 1 if is_settled and len(core.requests) else 0

    def rounds(self, num_rounds: int) -> list[tuple[float, float]]:
        """(wall, own CPU) seconds of each round: every worker publishes a step, then the leader turns until it has
        taken them all. Of one worker that is a turn; of several two, as the first to publish ends the read.
        """
        times = []
        self.num_turns = 0
        for _ in range(num_rounds):
            self.workers.step()
            published = self._num_answered() + len(self.workers)
            start, begun = time.perf_counter(), time.thread_time()
            while self._num_answered() < published:
                self.leader.turn(MAX_BLOCK_S)
                self.num_turns += 1
            times.append((time.perf_counter() - start, time.thread_time() - begun))
        return times

    def _num_answered(self) -> int:
        return sum(lane.answered for lane in self.leader.position.core.lanes.values())


def measure_leader(url: str, num_rows: int, num_rounds: int, num_workers: int = 1) -> dict[str, Value]:
    """In a round the leader takes one result of each worker and sends each its next plan."""
    with LeaderBench(url, num_rows=num_rows, num_workers=num_workers) as bench:
        gc.collect()
        times = bench.rounds(num_rounds)
        core = bench.leader.position.core
        core.check_integrity()
        assert {lane.planned - lane.answered for lane in core.lanes.values()} == {core.config.plan_ahead}
        wall = Times.of([wall for wall, _ in times])
        own = Times.of([cpu for _, cpu in times])
    return {
        "workers": float(num_workers),
        "rows each": float(num_rows),
        **wall.row(),
        "own CPU p50 µs": own.p50,
        "steps/s each": 1e6 / wall.mean,
    }


# ---------------------------------------------------------------- a reaction


def _lead(url: str, pool: str, num_rows: int) -> None:
    """The leader's process."""
    leader = _service(url, pool, num_rows).take_over(threading.Event())
    assert leader is not None
    while True:
        leader.turn(MAX_BLOCK_S)


@contextmanager
def led_pool(url: str, num_rows: int) -> Iterator[BenchWorkers]:
    """One worker whose rows all decode, and a leader in a process of its own."""
    pool = f"bench-{next(_pools)}"
    process = multiprocessing.get_context("spawn").Process(target=_lead, args=(url, pool, num_rows), daemon=True)
    with BenchWorkers(url, pool, num_rows=num_rows, num_workers=1) as workers:
        workers.register()
        process.start()
        try:
            while not workers.begin():
                assert process.is_alive()
                time.sleep(0.05)
            workers.fill()
            while workers.num_decoding < num_rows:
                workers.read(block_ms=100)
                workers.publish()
            yield workers
        finally:
            process.terminate()
            process.join()


def measure_reaction(url: str, num_rows: int, num_steps: int) -> dict[str, Value]:
    """The worker publishes a result and waits for the plan that follows from it; the one before that it has already."""
    seconds = []
    with led_pool(url, num_rows) as workers:
        while workers.num_plans < 2:
            workers.read(block_ms=100)
        for _ in range(num_steps):
            start = time.perf_counter()
            workers.publish()
            while workers.num_plans < 2:
                workers.read(block_ms=1000)
            seconds.append(time.perf_counter() - start)
    return {"rows": float(num_rows), **Times.of(seconds).row()}
