"""Redis comes back with less than it had, or is emptied: nobody goes on from what is gone, and nobody is restarted."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.ports import free_port
from services.cli.redis_server import find_redis_server
from shared.keys import Keys
from shared.redis_client import RedisFailure, connect
from shared.scripts import read_fence
from tests.integration.scheduler.conftest import LAPSE_S, Pool, Scheduler, wait_for


class OwnRedis:
    """A Redis that can be killed and started again with what its log holds, or with less."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        options = f"--port {self.port} --bind 127.0.0.1 --save  --appendonly yes --appendfsync always"
        command = [str(find_redis_server().path), *options.split(" "), "--dir", str(self._folder)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = connect(self.url)
        wait_for(lambda: self._answers(client))
        client.close()
        return process

    @staticmethod
    def _answers(client: Any) -> bool:
        try:
            return bool(client.ping())
        except RedisFailure:
            return False

    @property
    def log_file(self) -> Path:
        """The append-only file, or since Redis 7 the part of it that is being written."""
        return next(self._folder.rglob("*.aof"))

    def restart(self, *, lose_bytes: int = 0, cut_behind: str = "") -> None:
        """Killed, and started with a file that lacks its last bytes, or all behind the last command on a key."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        if lose_bytes:
            os.truncate(self.log_file, self.log_file.stat().st_size - lose_bytes)
        if cut_behind:
            _cut_transaction(self.log_file, cut_behind)
        self._process = self._start()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _cut_transaction(file: Path, key: str) -> None:
    """Behind the last command on `key`, which is to be inside a transaction: its end is lost."""
    data = file.read_bytes()
    at = data.rindex(b"\r\n" + key.encode() + b"\r\n")
    next_command = data.index(b"\r\n*", at) + 2
    assert data.rindex(b"MULTI", 0, at) > data.rfind(b"EXEC", 0, at), "not inside a transaction"
    os.truncate(file, next_command + 1)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    server = OwnRedis(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def own_pool(own_redis: OwnRedis, keys: Keys) -> Iterator[Pool]:
    # Who lost its epoch waits until its own lease has lapsed.
    pool = Pool(own_redis.url, keys, lease_ttl_s=LAPSE_S)
    yield pool
    for worker in pool.workers:
        worker._dead.set()
    for scheduler in pool.schedulers:
        scheduler.crash()
    for worker in pool.workers:
        worker.stop()
    pool.client.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Scheduler], None]]:
    """Runs the whole service in a thread, as the process does."""
    threads: list[tuple[Scheduler, threading.Thread]] = []

    def start(scheduler: Scheduler) -> None:
        thread = threading.Thread(target=scheduler.service.run, args=(scheduler.stop_event,), daemon=True)
        threads.append((scheduler, thread))
        thread.start()

    yield start
    for scheduler, thread in threads:
        scheduler.stop_event.set()
        thread.join(20)


Serve = Callable[[Scheduler], None]


@pytest.mark.parametrize("when", ["under load", "idle"])
def test_an_emptied_redis_serves_new_requests_at_once(
    own_pool: Pool, serve: Serve, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 111. FLUSHALL. No number that was in use before is given again."""
    caplog.set_level("INFO", "pagewire.scheduler")
    pool = own_pool
    worker = pool.worker(step_s=0.003)
    serve(pool.scheduler())
    pool.submit(8, max_tokens=200 if when == "under load" else 20)
    if when == "idle":
        pool.wait_until_ended()
    wait_for(lambda: len(worker.statuses) > 20)
    epoch, incarnation = read_fence(pool.client, pool.keys).epoch, worker.incarnations[-1]
    pool.client.flushall()
    began = time.monotonic()
    pool.submissions.clear()
    pool.submit(8)
    pool.wait_until_ended()
    assert time.monotonic() - began < 10
    pool.check_texts()
    assert read_fence(pool.client, pool.keys).epoch > epoch
    assert worker.incarnations[-1] > incarnation
    assert [record.getMessage() for record in caplog.records].count("cold_start") == 2


@pytest.mark.timeout(120)
def test_a_redis_that_is_restarted_under_load_loses_nobody(own_redis: OwnRedis, own_pool: Pool, serve: Serve) -> None:
    pool = own_pool
    worker = pool.worker(step_s=0.003)
    serve(pool.scheduler())
    serve(pool.scheduler())
    pool.submit(8, max_tokens=200)
    wait_for(lambda: len(worker.statuses) > 20)
    own_redis.restart()
    began, num_steps = time.monotonic(), len(worker.statuses)
    wait_for(lambda: len(worker.statuses) > num_steps + 4)
    assert time.monotonic() - began < 5
    pool.wait_until_ended()
    pool.check_texts()


@pytest.mark.timeout(120)
def test_a_transaction_that_was_cut_off_does_not_come_back(own_redis: OwnRedis, own_pool: Pool, serve: Serve) -> None:
    """Redis leaves it out when it starts, but not out of its file: the next start carried it out as well, behind what
    had been decided anew, so requests were accounted for twice."""
    pool = own_pool
    pool.worker(step_s=0.003)
    serve(pool.scheduler())
    pool.submit(4, max_tokens=20)
    pool.wait_until_ended()
    own_redis.restart(cut_behind=pool.keys.usage)
    pool.client.close()  # its connections are of the former process
    assert not all(pool.has_ended(request_id) for request_id in pool.submissions), "no end was lost"
    pool.wait_until_ended()
    wait_for(lambda: _has_rewritten(pool))
    own_redis.restart()
    pool.client.close()
    pool.submit(2)
    pool.wait_until_ended()
    pool.check_texts()


def _has_rewritten(pool: Pool) -> bool:
    run_id, persistence = pool.client.info("server")["run_id"], pool.client.info("persistence")
    is_asked = read_fence(pool.client, pool.keys).redis_run_id == run_id
    return is_asked and not persistence["aof_rewrite_in_progress"] and not persistence["aof_rewrite_scheduled"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lose_bytes", [1, 3_000, 20_000])
def test_after_a_cut_log_all_goes_on_from_what_is_left(
    own_redis: OwnRedis, own_pool: Pool, serve: Serve, lose_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the append-only file is lost, acknowledged commits and steps with it: every text is what it would have
    been, under numbers that were never given before."""
    caplog.set_level("INFO", "pagewire.scheduler")
    pool = own_pool
    worker = pool.worker(step_s=0.003)
    serve(pool.scheduler())
    pool.submit(8, max_tokens=200)
    wait_for(lambda: len(worker.statuses) > 60)
    before = read_fence(pool.client, pool.keys)
    own_redis.restart(lose_bytes=lose_bytes)
    began, num_steps = time.monotonic(), len(worker.statuses)
    wait_for(lambda: len(worker.statuses) > num_steps + 4)
    assert time.monotonic() - began < 5
    pool.wait_until_ended()
    pool.check_texts()
    after = read_fence(pool.client, pool.keys)
    if lose_bytes > 1:
        assert after.epoch > before.epoch, "it was not noticed"
        assert worker.incarnations[-1] > before.workers["worker-0"].incarnation
