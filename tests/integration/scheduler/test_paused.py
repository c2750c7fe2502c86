"""SIGSTOP of a scheduler process past its lease, then SIGCONT: what it still writes is refused, and it stands by."""

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from shared.scripts import read_fence
from tests.integration.scheduler.conftest import Pool, Process, wait_for


def said(process: Process, event: str) -> int:
    return sum(line["event"] == event for line in process.events())


@pytest.mark.timeout(180)
def test_a_paused_leader_is_followed_refused_and_stands_by(pool: Pool, started: Callable[..., Any]) -> None:
    """Two processes are stopped in turn, each while it leads, at random instants."""
    chance = random.Random(1)
    worker = pool.worker(step_s=0.004)
    leading: Process = started("first")
    wait_for(lambda: read_fence(pool.client, pool.keys).epoch == 1)
    standby: Process = started("second")
    wait_for(lambda: standby.has_said("following"))
    for round_ in range(1, 5):
        pool.submit(8, max_tokens=200)
        time.sleep(chance.uniform(0.0, 0.3))
        pause_past_the_lease(pool, leading, epoch=round_ + 1)
        before, followed = said(leading, "leadership_lost"), said(leading, "following")
        leading.process.send_signal(signal.SIGCONT)
        pool.wait_until_ended()
        wait_until_said(leading, "leadership_lost", before + 1)
        wait_until_said(leading, "following", followed + 1)
        leading, standby = standby, leading
    pool.check_texts()
    assert worker.incarnations == [1], "the worker noticed"
    assert read_fence(pool.client, pool.keys).refused["leader"] >= 1, "no late write was made"
    assert said(leading, "took_over_hot") + said(standby, "took_over_hot") == 4
    assert leading.process.poll() is None and standby.process.poll() is None


def pause_past_the_lease(pool: Pool, leading: Process, epoch: int) -> None:
    leading.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: pool.health() and read_fence(pool.client, pool.keys).epoch == epoch)


def wait_until_said(process: Process, event: str, times: int) -> None:
    wait_for(lambda: said(process, event) >= times)
