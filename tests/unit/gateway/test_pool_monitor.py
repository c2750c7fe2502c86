"""Who is admitted while the pool is away for a moment."""

import time
from typing import Any

import pytest

from services.gateway.health import PoolMonitor, PoolView
from shared.errors import Unavailable
from shared.keys import Keys
from shared.limits import Limits
from shared.messages import Lease, PoolStats, WorkerState

LEADER = Lease("scheduler", "s", "i", 0, WorkerState.READY)
WORKER = Lease("gpu_worker", "w", "i", 0, WorkerState.READY)
STATS = PoolStats(1, 1, 0, 0, 10, 10, 0, 0, 1, 0, 0)
LIMITS = Limits(max_request_tokens=512, max_model_len=512)


class CannedRedis:
    """Answers no command: a poll must not be made here."""


def monitor(view: PoolView, *, was_ready: bool) -> PoolMonitor:
    client: Any = CannedRedis()
    made = PoolMonitor(client, Keys("test"), admission_grace_s=30)
    made.view = view
    made._last_ready = time.monotonic() if was_ready else None
    return made


def test_a_pool_that_was_ready_a_moment_ago_still_takes_requests() -> None:
    away = PoolView(time.monotonic(), limits=LIMITS)
    assert monitor(away, was_ready=True).admit(reader_started=True) == LIMITS
    with pytest.raises(Unavailable) as refused:
        monitor(away, was_ready=False).admit(reader_started=True)
    assert refused.value.reason == "no_leader"


@pytest.mark.parametrize("is_ready", [True, False])
def test_nothing_is_admitted_whose_answer_could_not_be_read(is_ready: bool) -> None:
    """Also in the grace after the pool was ready: a request tracked by a reader without a position loses tokens."""
    now = time.monotonic()
    view = PoolView(now, LEADER, (WORKER,), STATS, LIMITS) if is_ready else PoolView(now, limits=LIMITS)
    with pytest.raises(Unavailable) as refused:
        monitor(view, was_ready=True).admit(reader_started=False)
    assert refused.value.reason == "starting"
