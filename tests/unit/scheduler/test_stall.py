"""Work and no progress: when it is told, and why."""

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.diagnostics import diagnose_waiting
from services.scheduler.service.stall import Stall, StallDetector
from tests.fakes.scheduler_world import World, make_submission


class Watched:
    def __init__(self) -> None:
        self.now = 5.0
        self.world = World(SchedulerConfig(max_model_len=100, block_size=4))
        self.detector = StallDetector(3.0, lambda: self.now)

    def submit(self, name: str, max_tokens: int = 20) -> None:
        self.world.submit(make_submission(name, [1, 2, 3], max_tokens=max_tokens))

    def look(self, seconds: float = 0.0) -> Stall:
        self.now += seconds
        return self.detector.look(self.world.core, diagnose_waiting(self.world.core, 10))


def test_a_pool_without_a_worker_is_told(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.submit("r")
    watched.world.turn()
    assert watched.look() == watched.look(3.0) == Stall()
    assert watched.look(0.5) == Stall(3.5, "no_worker")
    assert watched.look(1.0) == Stall(4.5, "no_worker")
    watched.world.join("one", 40)
    watched.world.turn()
    assert watched.look(0.5) == Stall()
    assert [record.getMessage() for record in caplog.records if "stall" in record.getMessage()] == ["stalled"]


def test_a_step_that_does_not_end_is_told() -> None:
    watched = Watched()
    watched.world.join("one", 40)
    watched.submit("r")
    watched.world.turn()
    watched.look()
    assert watched.look(4.0).reason == "step"


def test_every_result_is_progress() -> None:
    watched = Watched()
    watched.world.join("one", 40)
    watched.submit("r", max_tokens=30)
    watched.world.turn()
    for _ in range(10):
        assert watched.look(2.0) == Stall()
        watched.world.step("one")
        watched.world.turn()


def test_an_idle_pool_is_not_stalled() -> None:
    watched = Watched()
    watched.world.join("one", 40)
    watched.submit("r")
    watched.world.settle()
    watched.look()
    assert watched.look(1000.0) == Stall()
    watched.submit("r2")
    watched.world.turn()
    assert watched.look(0.1) == Stall(), "the time before does not count"
