"""The leader's whole turn with a real Redis: read, decide, commit, chores.

Redis is one of its own, configured as `pagewire up` does it (append-only file, Unix socket). Workers are arrays in this
process; what they do lies outside the measured time, so a turn always finds its results in the log.

Where a turn's time goes, and what was expected of the direct connection (`shared/channel.py`): infra/adr/0005.
"""

import asyncio
import gc
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from benchmarks.report import Times, Value
from benchmarks.scheduler_step.array_worker import ArrayWorker
from benchmarks.scheduler_step.core_bench import FOREVER, submission
from services.cli.redis_server import find_redis_server, prepare
from services.scheduler.service.leader import MAX_BLOCK_S
from services.scheduler.service.service import SchedulerService
from services.scheduler.settings import Settings
from shared.keys import Keys
from shared.leases import who
from shared.messages import Decoder, Lease, StepPlan, StepResult, WorkerState, encode
from shared.redis_client import connect, connect_async, open_channel
from shared.scripts import AppendStatus, publish_step, read_fence, submit
from shared.streams import START, read_channel
from tests.harness.own_redis import running

LEASE_MS = 600_000
MAX_MODEL_LEN = 200_000

_plans: Decoder[StepPlan] = Decoder(StepPlan)


@contextmanager
def own_redis() -> Iterator[str]:
    """URL of a Redis for this measurement."""
    with tempfile.TemporaryDirectory() as folder:
        own = prepare(Path(folder), find_redis_server())
        with running(own):
            yield own.url


class LeaderBench:
    """A pool in one process: `with LeaderBench(url, …) as bench`. Every worker has `num_rows` requests."""

    def __init__(self, url: str, *, num_rows: int, num_workers: int = 1, pool: str = "bench") -> None:
        self._url, self._keys, self._num_rows = url, Keys(pool), num_rows
        self._client, self._channel = connect(url), open_channel(url)
        settings = Settings(
            redis_url=url,
            pool=pool,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows + 4096,
            max_model_len=MAX_MODEL_LEN,
            max_queued_requests=0,
        )
        lease = Lease("scheduler", "scheduler-0", f"bench-{pool}", 1, WorkerState.READY)
        self._service = SchedulerService(settings, lease)
        self._names = [f"worker-{number}" for number in range(num_workers)]
        self._workers: dict[str, ArrayWorker] = {}
        """By plan stream."""
        self._inboxes: dict[str, deque[bytes]] = {}
        """Plans that are not carried out yet."""
        self._positions: dict[str, str] = {}
        self.num_steps = 0
        """That the leader took in the last `turns`."""

    def __enter__(self) -> Self:
        leader = self._service.take_over(threading.Event())
        assert leader is not None
        self.leader = leader
        self._register()
        asyncio.run(self._submit(self._num_rows * len(self._names)))
        self._settle()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self._client.close)
            stack.callback(self._channel.close)
            stack.callback(self._service.close)

    def _register(self) -> None:
        """Workers are there, and the leader has admitted them."""
        for name in self._names:
            lease = Lease(
                "gpu_worker",
                name,
                f"instance-of-{name}",
                1,
                WorkerState.READY,
                num_blocks=400 * self._num_rows + 20_000,
                block_size=16,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=self._num_rows,
            )
            self._client.set(self._keys.lease(who(lease)), encode(lease), px=LEASE_MS)
            self._client.sadd(self._keys.members, who(lease))
        lanes = self.leader.position.core.lanes
        while len(lanes) < len(self._names):
            self.leader.turn(0.01)
        for name, state in read_fence(self._client, self._keys).workers.items():
            stream = self._keys.plans(name, state.incarnation)
            self._workers[stream] = ArrayWorker(name, state.incarnation, self._num_rows)
            self._positions[stream] = START
            self._inboxes[stream] = deque()

    async def _submit(self, count: int) -> None:
        client = connect_async(self._url)
        try:
            for index in range(count):
                await submit(client, self._keys, submission(index, max_tokens=FOREVER), ttl_s=3600)
        finally:
            await client.aclose()

    def _settle(self) -> None:
        """Until everything decodes and every worker has its plans."""
        core = self.leader.position.core
        steady = 0
        while steady < 3:
            self.step()
            self.leader.turn()
            is_settled = not len(core.waiting) and not any(lane.prefill for lane in core.lanes.values())
            steady = steady + 1 if is_settled and len(core.requests) else 0

    def step(self) -> None:
        """Every worker that has a plan carries one out and publishes the result."""
        for stream, entries in read_channel(self._channel, self._positions).items():
            self._positions[stream] = entries[-1].entry_id
            self._inboxes[stream].extend(entry.payload for entry in entries)
        for stream, inbox in self._inboxes.items():
            if inbox:
                result = self._workers[stream].step(_plans.decode(inbox.popleft()))
                assert self._publish(result) is AppendStatus.OK

    def _publish(self, result: StepResult) -> AppendStatus:
        return publish_step(
            self._client,
            self._keys,
            worker=result.worker,
            incarnation=result.incarnation,
            step_id=result.step_id,
            payload=encode(result),
        )

    def turns(self, num_turns: int) -> list[tuple[float, float]]:
        """(wall, own CPU) seconds of each turn; before each, every worker publishes a step."""
        lanes, times = self.leader.position.core.lanes.values(), []
        answered = sum(lane.answered for lane in lanes)
        for _ in range(num_turns):
            self.step()
            start, begun = time.perf_counter(), time.thread_time()
            self.leader.turn(MAX_BLOCK_S)
            times.append((time.perf_counter() - start, time.thread_time() - begun))
        self.num_steps = sum(lane.answered for lane in lanes) - answered
        return times


def measure_leader(url: str, num_rows: int, num_turns: int, num_workers: int = 1) -> dict[str, Value]:
    """A turn takes one result of each worker and sends each its next plan."""
    with LeaderBench(url, num_rows=num_rows, num_workers=num_workers, pool=f"bench-{num_workers}-{num_rows}") as bench:
        gc.collect()
        times = bench.turns(num_turns)
        core = bench.leader.position.core
        core.check_integrity()
        assert {lane.planned - lane.answered for lane in core.lanes.values()} == {core.config.plan_ahead}
        assert bench.num_steps == num_turns * num_workers
        wall = Times.of([wall for wall, _ in times])
        own = Times.of([cpu for _, cpu in times])
    return {
        "workers": float(num_workers),
        "rows each": float(num_rows),
        **wall.row(),
        "own CPU p50 µs": own.p50,
        "steps/s each": 1e6 / wall.mean,
    }
