"""The scheduler as a process: `python -m services.scheduler`."""

import os
import pkgutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import services.scheduler
from services.cli.ports import free_port
from services.scheduler.__main__ import main
from shared.leases import decode_lease, read_members
from shared.messages import WorkerState
from shared.scripts import read_fence
from tests.integration.scheduler.conftest import ROOT, Pool, wait_for


def test_kill_9_in_the_middle_is_followed_by_a_standby(pool: Pool, started: Any) -> None:
    worker = pool.worker(step_s=0.004)
    first = started("first")
    wait_for(lambda: read_fence(pool.client, pool.keys).epoch == 1)
    standby = started("standby")
    wait_for(lambda: standby.has_said("following"))
    pool.submit(8, max_tokens=150)
    wait_for(lambda: len(worker.statuses) > 20)
    first.process.kill()
    pool.wait_until_ended()
    pool.check_texts()
    assert worker.incarnations == [1]
    assert standby.has_said("took_over_hot") and not standby.has_said("cold_start")


def test_sigterm_saves_gives_the_lease_back_and_ends_with_0(pool: Pool, started: Any) -> None:
    worker = pool.worker(step_s=0.004)
    first = started("first", lease_ttl_s=30)
    pool.submit(8, max_tokens=100)
    wait_for(lambda: len(worker.statuses) > 20)
    lease: Any = pool.client.get(pool.keys.leader_lease)
    held = decode_lease(lease)
    assert held is not None and held.instance == "first"
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(5) == 0
    assert pool.client.get(pool.keys.leader_lease) is None
    assert not any("scheduler" in name for name, lease in read_members(pool.client, pool.keys).items() if lease)
    second = started("second", lease_ttl_s=30)
    pool.wait_until_ended()
    pool.check_texts()
    replayed = next(line for line in second.events() if line["event"] == "ticks_replayed")
    assert replayed["num_ticks"] == 0, "the snapshot was taken at the last tick"
    assert worker.incarnations == [1]


def test_logs_are_one_line_each_and_hold_no_tokens(pool: Pool, started: Any) -> None:
    pool.worker()
    process = started("first")
    pool.submit(3)
    pool.wait_until_ended()
    events = {line["event"] for line in process.events()}
    assert {"leading", "worker_fenced", "worker_joined"} <= events
    known = {"event", "time", "level", "service"}
    fields = {name for line in process.events() for name in line} - known
    assert fields <= {"epoch", "worker", "incarnation", "num_blocks", "new_holder", "reason", "num_requests", "tick",
                      "log_id", "intake_id", "num_objects"}  # fmt: skip


def test_its_own_lease_says_what_it_does(pool: Pool, started: Any) -> None:
    """A standby is as ready as the leader."""

    def is_ready(instance: str) -> bool:
        lease = read_members(pool.client, pool.keys).get(f"scheduler:scheduler-0:{instance}")
        return lease is not None and lease.state is WorkerState.READY

    started("first", max_model_len=256)
    wait_for(lambda: is_ready("first"))
    started("second", max_model_len=256)
    wait_for(lambda: is_ready("second"))
    assert read_fence(pool.client, pool.keys).epoch == 1


@pytest.mark.parametrize(("name", "value"), [("block_size", "0"), ("plan_ahead", "9"), ("pool", "a b")])
def test_a_bad_setting_is_named_and_ends_with_2(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"PAGEWIRE_{name.upper()}", value)
    assert main() == 2
    assert name in capsys.readouterr().err


def test_a_redis_outage_is_waited_out(pool: Pool, started: Any) -> None:
    """Redis answers nobody for longer than every lease lasts: nobody is fenced for it, and all texts are exact."""
    worker = pool.worker(step_s=0.004)
    process = started("first")
    pool.submit(8, max_tokens=100)
    wait_for(lambda: len(worker.statuses) > 20)
    server: Any = pool.client.info("server")
    redis_pid = int(server["process_id"])
    os.kill(redis_pid, signal.SIGSTOP)
    try:
        time.sleep(3.0)
    finally:
        os.kill(redis_pid, signal.SIGCONT)
    pool.wait_until_ended()
    pool.check_texts()
    assert process.process.poll() is None
    assert worker.incarnations == [1]


def test_a_second_sigterm_does_not_wait_for_redis(pool: Pool, started: Any) -> None:
    """The first one saves, and gives the lease back: as long as Redis answers, that takes a moment."""
    pool.worker()
    process = started("first").process
    wait_for(lambda: read_fence(pool.client, pool.keys).epoch == 1)
    server: Any = pool.client.info("server")
    redis_pid = int(server["process_id"])
    os.kill(redis_pid, signal.SIGSTOP)
    try:
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(1) == 0
    finally:
        os.kill(redis_pid, signal.SIGCONT)


def test_it_waits_for_redis_to_come_up(pool: Pool, started: Any) -> None:
    process = started("first", redis_url=f"redis://127.0.0.1:{free_port()}/0")
    wait_for(lambda: process.has_said("redis_unavailable"))
    assert process.process.poll() is None
    process.process.send_signal(signal.SIGTERM)
    assert process.process.wait(10) == 0


def test_no_module_of_the_scheduler_loads_torch() -> None:
    modules = [m.name for m in pkgutil.walk_packages(services.scheduler.__path__, "services.scheduler.")]
    assert len(modules) > 20
    code = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
unwanted = {{"torch", "transformers", "numpy", "kernels", "fastapi"}} & set(sys.modules)
assert not unwanted, unwanted
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
