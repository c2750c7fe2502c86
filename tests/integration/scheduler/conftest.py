"""A pool on a real Redis: schedulers and content workers in threads, submissions as a gateway makes them."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

import services.scheduler
from services.scheduler.service.leader import Leader
from services.scheduler.service.service import SchedulerService
from services.scheduler.settings import Settings
from shared.errors import Fenced
from shared.keys import Keys
from shared.leases import decode_lease, new_instance
from shared.messages import (
    FIELD,
    Decoder,
    IntakeMessage,
    Lease,
    LogMessage,
    Submission,
    TickEntry,
    UsageRecord,
    WorkerState,
    encode,
)
from shared.records import RequestRecord, read_record
from shared.redis_client import connect, connect_async
from shared.scripts import submit
from shared.streams import scan
from tests.fakes.content_worker import reference_logprob, reference_output
from tests.fakes.live_worker import LiveWorker
from tests.fakes.scheduler_world import make_submission

LEASE_TTL_S = 30.0
"""Longer than any stall of the machine: a leader that lives is not followed because its thread was late …"""
LAPSE_S = 0.4
"""… and one that crashed has renewed its lease for no longer than this."""
ROOT = Path(services.scheduler.__file__).parents[2]


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Until `condition` holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.005)


class Scheduler:
    """One scheduler process, as far as Redis can tell."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.instance = new_instance()
        lease = Lease("scheduler", "scheduler-0", self.instance, 1, WorkerState.READY)
        self.service = SchedulerService(settings, lease)
        self.stop_event = threading.Event()
        self.leader: Leader | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def take_over(self) -> Leader:
        """Lead without a thread; the test turns."""
        leader = self.service.take_over(self.stop_event)
        assert leader is not None
        self.leader = leader
        return leader

    def start(self) -> "Scheduler":
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            leader = self.take_over()
            while not self.stop_event.is_set():
                leader.turn(0.05)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()

    def crash(self) -> None:
        """Die as by SIGKILL: nothing is saved, nothing given back, the lease lapses in `LAPSE_S`."""
        self.stop_event.set()
        if self._thread.ident is not None:
            self.join()
        self.service.close()
        self._shorten_lease()
        if self.error is not None and not isinstance(self.error, Fenced):
            raise self.error

    def _shorten_lease(self) -> None:
        key = Keys(self._settings.pool).leader_lease
        with closing(connect(self._settings.redis_url)) as client:
            data: Any = client.get(key)
            lease = decode_lease(data)
            if lease is not None and lease.instance == self.instance:
                client.pexpire(key, int(LAPSE_S * 1000))


class Pool:
    """What a test does to a pool. `changes`: settings of all its schedulers."""

    def __init__(self, url: str, keys: Keys, **changes: object) -> None:
        self.url, self.keys = url, keys
        self.client: redis.Redis = connect(url)
        self.settings = Settings(
            redis_url=url,
            pool=keys.pool,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            max_model_len=256,
            lease_ttl_s=LEASE_TTL_S,
            snapshot_interval_s=0.2,
        ).model_copy(update=changes)
        self.schedulers: list[Scheduler] = []
        self.workers: list[LiveWorker] = []
        self.submissions: dict[str, Submission] = {}
        self._random = random.Random(7)

    def scheduler(self, **changes: object) -> Scheduler:
        """A scheduler process, not started."""
        scheduler = Scheduler(self.settings.model_copy(update=changes))
        self.schedulers.append(scheduler)
        return scheduler

    def worker(self, name: str = "worker-0", **options: Any) -> LiveWorker:
        """A worker process, running."""
        worker = LiveWorker(self.url, self.keys, name, **options)
        self.workers.append(worker)
        return worker.start()

    def await_vacancy(self) -> None:
        """Until nobody leads: who starts then has followed nobody."""
        wait_for(lambda: not self.client.exists(self.keys.leader_lease))

    def submit(
        self,
        count: int,
        *,
        min_prompt: int = 1,
        max_prompt: int = 40,
        max_tokens: int = 40,
        prefix: Sequence[int] = (),
    ) -> list[str]:
        """Random requests that do not end early by EOS; all prompts begin with `prefix`."""
        fresh = []
        for _ in range(count):
            prompt = [*prefix]
            prompt += [self._random.randrange(1, 24) for _ in range(self._random.randint(min_prompt, max_prompt))]
            length = self._random.randint(max(1, max_tokens // 2), max_tokens)
            number = len(self.submissions)
            submission = make_submission(
                f"r{number}", prompt, max_tokens=length, min_tokens=length // 2, with_logprobs=number % 2 == 0
            )
            fresh.append(submission)
            self.submissions[submission.request_id] = submission
        self.submit_these(*fresh)
        return [submission.request_id for submission in fresh]

    def submit_these(self, *submissions: Submission) -> None:
        self.submissions |= {submission.request_id: submission for submission in submissions}
        asyncio.run(self._submit(list(submissions)))

    async def _submit(self, submissions: list[Submission]) -> None:
        client = connect_async(self.url)
        try:
            for submission in submissions:
                await submit(client, self.keys, submission, ttl_s=3600)
        finally:
            await client.aclose()

    def send(self, message: IntakeMessage) -> None:
        self.client.xadd(self.keys.intake, {FIELD: encode(message)})

    def record(self, request_id: str) -> RequestRecord:
        record = read_record(self.client, self.keys, request_id)
        assert record is not None
        return record

    def has_ended(self, request_id: str) -> bool:
        return self.record(request_id).final is not None

    def wait_until_ended(self, timeout_s: float = 20.0) -> None:
        def all_ended() -> bool:
            return self.health() and all(self.has_ended(request_id) for request_id in self.submissions)

        wait_for(all_ended, timeout_s)

    def health(self) -> bool:
        """Raises what a thread died of."""
        errors = [scheduler.error for scheduler in self.schedulers] + [worker.error for worker in self.workers]
        for error in errors:
            if error is not None and not isinstance(error, Fenced):
                raise error
        return True

    def check_texts(self) -> None:
        """Every request has exactly the output that it would have had alone."""
        for request_id, submission in self.submissions.items():
            record = self.record(request_id)
            expected, reason = reference_output(submission)
            assert list(record.output) == expected, request_id
            assert record.final is not None and record.final.end_reason == reason, request_id
            logprob = reference_logprob(submission, expected) if submission.params.with_logprobs else 0.0
            assert record.final.cumulative_logprob == logprob == sum(record.logprobs), request_id
        self.check_usage()

    def check_usage(self) -> None:
        """Every request that ended has one usage record, which says what its final record says."""
        decoder: Decoder[UsageRecord] = Decoder(UsageRecord)
        records = [decoder.decode(payload) for _, payload in scan(self.client, self.keys.usage)]
        used = {record.request_id: record for record in records}
        assert len(used) == len(records), "a request was accounted for twice"
        assert all(self.has_ended(request_id) for request_id in used)
        assert set(used) >= {request_id for request_id in self.submissions if self.has_ended(request_id)}
        for request_id, usage in used.items():
            if request_id not in self.submissions:
                continue
            submission, final = self.submissions[request_id], self.record(request_id).final
            assert final is not None
            assert usage.reason == final.reason and usage.num_cached_tokens == final.num_cached_tokens
            assert usage.num_prompt_tokens == len(submission.prompt_tokens) // 4
            assert usage.num_output_tokens == final.num_output_tokens <= usage.num_generated_tokens
            assert usage.ended >= usage.created == submission.created

    def told_cached(self) -> dict[str, int]:
        """Cached prompt tokens of requests, as the log tells them; each is told once."""
        told: dict[str, int] = {}
        decoder: Decoder[LogMessage] = Decoder(LogMessage)
        for _, payload in scan(self.client, self.keys.steps):
            entry = decoder.decode(payload)
            for request_id, num_cached_tokens in entry.cached if isinstance(entry, TickEntry) else ():
                assert request_id not in told
                told[request_id] = num_cached_tokens
        return told

    def steps(self) -> int:
        return int(self.client.xlen(self.keys.steps))


@pytest.fixture
def pool(redis_url: str, keys: Keys) -> Iterator[Pool]:
    made = Pool(redis_url, keys)
    yield made
    for worker in made.workers:
        worker._dead.set()
    for scheduler in made.schedulers:
        scheduler.crash()
    for worker in made.workers:
        worker.stop()
    made.client.close()


class Process:
    """One scheduler process; its log is kept."""

    def __init__(self, world: Pool, instance: str, folder: Path, **settings: object) -> None:
        self.log = folder / f"{instance}.log"
        given = {
            "redis_url": world.url,
            "pool": world.keys.pool,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "lease_ttl_s": 1.0,
            "instance": instance,
            **settings,
        }
        environment = {f"PAGEWIRE_{name.upper()}": str(value) for name, value in given.items()}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.scheduler"], cwd=ROOT, env={**os.environ, **environment}, stderr=log
            )

    def events(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.log.read_bytes().splitlines()]

    def has_said(self, event: str) -> bool:
        return any(line["event"] == event for line in self.events())


@pytest.fixture
def started(pool: Pool, tmp_path: Path) -> Iterator[Any]:
    processes: list[Process] = []

    def start(instance: str, **settings: object) -> Process:
        processes.append(Process(pool, instance, tmp_path, **settings))
        return processes[-1]

    yield start
    for process in processes:
        process.process.kill()
        process.process.wait()
