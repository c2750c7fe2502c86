"""The other side of a leader under measurement: array workers that read plans and publish results through Redis."""

import asyncio
from collections import deque
from typing import Self

from benchmarks.scheduler_step.array_worker import ArrayWorker
from benchmarks.scheduler_step.core_bench import FOREVER, submission
from services.scheduler.settings import Settings
from shared.keys import Keys
from shared.leases import who
from shared.messages import Decoder, Lease, StepPlan, WorkerState, encode
from shared.redis_client import connect, connect_async, open_channel
from shared.scripts import AppendStatus, publish_step, read_fence, submit
from shared.streams import START, read_channel

LEASE_MS = 600_000
MAX_MODEL_LEN = 200_000

_plans: Decoder[StepPlan] = Decoder(StepPlan)


def pool_settings(url: str, pool: str, num_rows: int) -> Settings:
    """A pool whose workers have `num_rows` rows."""
    return Settings(
        redis_url=url,
        pool=pool,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows + 4096,
        max_model_len=MAX_MODEL_LEN,
        max_queued_requests=0,
    )


class BenchWorkers:
    """Workers of one pool, each with `num_rows` rows, and the requests that fill them."""

    def __init__(self, url: str, pool: str, *, num_rows: int, num_workers: int) -> None:
        self._url, self._keys, self._num_rows = url, Keys(pool), num_rows
        self._client, self._channel = connect(url), open_channel(url)
        self._names = [f"worker-{number}" for number in range(num_workers)]
        self._workers: dict[str, ArrayWorker] = {}
        """By plan stream."""
        self._inboxes: dict[str, deque[bytes]] = {}
        """Plans that are not carried out yet."""
        self._positions: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._channel.close()

    def register(self) -> None:
        """Say that they are ready."""
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

    def begin(self) -> bool:
        """Whether the leader has admitted them all; then they serve."""
        admitted = {n: s for n, s in read_fence(self._client, self._keys).workers.items() if s.holder}
        if len(admitted) < len(self):
            return False
        for name, state in admitted.items():
            stream = self._keys.plans(name, state.incarnation)
            self._workers[stream] = ArrayWorker(name, state.incarnation, self._num_rows)
            self._positions[stream] = START
            self._inboxes[stream] = deque()
        return True

    def fill(self) -> None:
        """Submit a request for every row, which outlives the measurement."""
        asyncio.run(self._submit(self._num_rows * len(self)))

    async def _submit(self, count: int) -> None:
        client = connect_async(self._url)
        try:
            for index in range(count):
                await submit(client, self._keys, submission(index, max_tokens=FOREVER), ttl_s=3600)
        finally:
            await client.aclose()

    @property
    def num_decoding(self) -> int:
        """Rows that yield a token in every step."""
        return sum(worker.num_decoding for worker in self._workers.values())

    @property
    def num_plans(self) -> int:
        """That are there and not carried out."""
        return sum(len(inbox) for inbox in self._inboxes.values())

    def read(self, block_ms: int | None = None) -> None:
        """Take the plans that are there; wait up to `block_ms` for the first."""
        for stream, entries in read_channel(self._channel, self._positions, block_ms=block_ms).items():
            self._positions[stream] = entries[-1].entry_id
            self._inboxes[stream].extend(entry.payload for entry in entries)

    def publish(self) -> None:
        """Every worker that has a plan carries one out and publishes the result."""
        for stream, inbox in self._inboxes.items():
            if inbox:
                result = self._workers[stream].step(_plans.decode(inbox.popleft()))
                status = publish_step(
                    self._client,
                    self._keys,
                    worker=result.worker,
                    incarnation=result.incarnation,
                    step_id=result.step_id,
                    payload=encode(result),
                )
                assert status is AppendStatus.OK

    def step(self) -> None:
        """`read` without waiting, and `publish`."""
        self.read()
        self.publish()
