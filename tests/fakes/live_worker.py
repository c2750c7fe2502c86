"""A content worker on a real Redis, in a thread: lease, fence, plan stream, step log as infra/protocol.md has them."""

import os
import threading
from array import array
from itertools import count
from typing import Any

import msgspec

from shared.keys import Keys
from shared.leases import LeaseKeeper, new_instance
from shared.messages import Decoder, Lease, StepPlan, WorkerState, encode
from shared.packing import pack_int32, unpack_int32
from shared.redis_client import RedisFailure, connect, connect_blocking
from shared.scripts import AppendStatus, publish_step, read_fence
from shared.streams import START, read
from tests.fakes.content_worker import ContentWorker

BLOCK_S = 0.02
FENCE_CHECK_EVERY = 10
"""Idle reads between two looks at the fence."""

_plans: Decoder[StepPlan] = Decoder(StepPlan)


class RacingWorker(ContentWorker):
    """A content worker whose plans come over a network: one that was under way when a row ended may still name it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ended_in: dict[int, int] = {}

    def _leave(self, number: int) -> None:
        super()._leave(number)
        self._ended_in[number] = self.last_plan

    def _append_blocks(self, plan: StepPlan) -> None:
        pairs = unpack_int32(plan.blocks)
        kept = array("i")
        for row, block_id in zip(pairs[::2], pairs[1::2], strict=True):
            is_gone = row not in self.rows and row not in self.ended_rows
            if not (is_gone and self._ended_in.get(row) == plan.plan_id - 1):
                kept.extend((row, block_id))
        super()._append_blocks(msgspec.structs.replace(plan, blocks=pack_int32(kept)))


class LiveWorker:
    """One worker process. `step_s`: how long a forward pass takes."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        name: str = "worker-0",
        *,
        num_blocks: int = 64,
        num_cpu_blocks: int = 0,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_tokens: int = 32,
        max_model_len: int = 256,
        step_s: float = 0.0,
        lease_ttl_s: float = 2.0,
    ) -> None:
        self._keys = keys
        self._client = connect(url)
        self._reader = connect_blocking(url, block_s=BLOCK_S)
        self._base = new_instance()
        self._max_tokens = max_tokens
        self._step_s = step_s
        lease = Lease(
            service="gpu_worker",
            name=name,
            instance=self._base,
            pid=os.getpid(),
            state=WorkerState.READY,
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
        )
        self.keeper = LeaseKeeper(url, keys, lease, ttl_s=lease_ttl_s, interval_s=lease_ttl_s / 4)
        self._dead = threading.Event()
        self._paused = threading.Event()
        self._draining = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.statuses: list[AppendStatus] = []
        """Of every publication."""
        self.incarnations: list[int] = []
        """Every incarnation that this process held."""
        self.error: BaseException | None = None

    @property
    def instance(self) -> str:
        return self.keeper.lease.instance

    @property
    def name(self) -> str:
        return self.keeper.lease.name

    def start(self) -> "LiveWorker":
        self.keeper.start()
        self._thread.start()
        return self

    def drain(self) -> None:
        """As on SIGTERM: serve until the leader lets it go."""
        self._draining.set()
        self.keeper.update(state=WorkerState.DRAINING)

    @property
    def has_left(self) -> bool:
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Die at once: nothing more is published, the lease is left to lapse."""
        self.stop_renewing()
        self._dead.set()
        self._thread.join()

    def stop(self) -> None:
        """End in order."""
        self._dead.set()
        self._thread.join(10)
        self.keeper.stop()
        self._client.close()
        self._reader.close()
        if self.error is not None:
            raise self.error

    def stop_renewing(self) -> None:
        """Let the lease lapse while the worker works on."""
        self.keeper._interval_s = 3600.0
        self.keeper._wake.clear()

    def pause(self) -> None:
        """Hang: neither work nor renew, as a stopped process."""
        self.stop_renewing()
        self._paused.set()

    def stall(self) -> None:
        """Hang inside a step, while the lease is renewed."""
        self._paused.set()

    def resume(self) -> None:
        """Work on after `pause` or `stall`, lease included."""
        self.keeper._interval_s = 0.2
        self.keeper._wake.set()
        self._paused.clear()

    def _run(self) -> None:
        try:
            for number in count(1):
                if not self._serve_incarnation():
                    return
                self.keeper.update(instance=f"{self._base}.{number}")
        except BaseException as error:
            self.error = error

    def _serve_incarnation(self) -> bool:
        """Work until fenced; whether to register again."""
        incarnation = self._await_admission()
        if incarnation == 0:
            return False
        self.incarnations.append(incarnation)
        lease = self.keeper.lease
        worker = RacingWorker(
            lease.name,
            incarnation,
            num_blocks=lease.num_blocks,
            block_size=lease.block_size,
            max_num_seqs=lease.max_num_seqs,
            max_tokens=self._max_tokens,
            num_cpu_blocks=lease.num_cpu_blocks,
        )
        stream, position, idle = self._keys.plans(lease.name, incarnation), START, 0
        while not self._dead.is_set():
            if self._paused.is_set():
                self._dead.wait(0.01)
                continue
            entries = self._read(stream, position)
            for entry_id, payload in entries:
                position = entry_id
                worker.inbox.append(_plans.decode(payload))
            idle = 0 if entries else idle + 1
            if idle > FENCE_CHECK_EVERY and not self._is_held(incarnation, worker.last_plan):
                return not self._draining.is_set()
            while worker.inbox and not self._dead.is_set():
                if self._step(worker) is AppendStatus.STALE:
                    return not self._dead.is_set()
        return False

    def _step(self, worker: ContentWorker) -> AppendStatus:
        result = worker.step()
        if self._step_s:
            self._dead.wait(self._step_s)
        while self._paused.is_set() and not self._dead.is_set():
            self._dead.wait(0.01)
        payload = encode(result)
        while not self._dead.is_set():
            try:
                status = publish_step(
                    self._client,
                    self._keys,
                    worker=worker.name,
                    incarnation=worker.incarnation,
                    step_id=result.step_id,
                    payload=payload,
                )
            except RedisFailure:
                self._dead.wait(0.05)
                continue
            self.statuses.append(status)
            return status
        return AppendStatus.STALE

    def _read(self, stream: str, position: str) -> list[tuple[str, bytes]]:
        try:
            return list(read(self._reader, {stream: position}, block_ms=int(BLOCK_S * 1000)).get(stream, ()))
        except RedisFailure:
            self._dead.wait(0.05)
            return []

    def _await_admission(self) -> int:
        while not self._dead.wait(0.01):
            try:
                seat = read_fence(self._client, self._keys).workers.get(self.name)
            except RedisFailure:
                continue
            if seat is not None and seat.holder == self.instance:
                return seat.incarnation
        return 0

    def _is_held(self, incarnation: int, step: int) -> bool:
        """Whether the fence knows the incarnation, and the steps that it published."""
        try:
            fence = read_fence(self._client, self._keys).workers.get(self.name)
        except RedisFailure:
            return True
        return fence is not None and fence.incarnation == incarnation and fence.step >= step
