"""How long a step may take, and what counts as none."""

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.rates import Rates
from services.scheduler.service.step_deadlines import FACTOR, UNKNOWN_FLOORS, StepDeadlines
from services.scheduler.service.trimmer import Incarnation
from tests.fakes.scheduler_world import World, make_submission

FLOOR_S = 2.0
ONE = Incarnation("one", 1)


class Watched:
    """A pool whose worker hangs with plans in flight, and who watches it."""

    def __init__(self, floor_s: float = FLOOR_S, prompt: int = 6) -> None:
        self.now = 100.0
        self.world = World(SchedulerConfig(max_model_len=600, block_size=4, max_num_batched_tokens=512))
        self.world.join("one", 200)
        self.world.submit(make_submission("r", [1 + place % 20 for place in range(prompt)], max_tokens=50))
        self.world.turn()
        self.lane = self.world.core.lanes["one"]
        assert self.lane.in_flight
        self.deadlines = StepDeadlines(floor_s, lambda: self.now)

    def overdue_after(self, seconds: float, answered: int = 0) -> list[Incarnation]:
        """What looks that follow each other for so long end with."""
        until, found = self.now + seconds, self.deadlines.overdue(self.world.core, {ONE: answered})
        while self.now < until:
            self.now += 0.25
            found = self.deadlines.overdue(self.world.core, {ONE: answered})
        return found


def test_a_step_without_known_rates_has_several_floors() -> None:
    watched = Watched()
    watched.lane.rates = Rates()
    assert watched.overdue_after(UNKNOWN_FLOORS * FLOOR_S) == []
    assert watched.overdue_after(0.25) == [ONE]


def test_the_deadline_follows_from_the_plans_size_and_the_workers_rates() -> None:
    rates = Rates(prefill=100.0, decode_base_s=0.1, decode_row_s=0.01)
    small, large = Watched(prompt=10), Watched(prompt=400)
    small.lane.rates = large.lane.rates = rates
    assert small.deadlines.deadline_s(small.lane) == FLOOR_S + FACTOR * (0.11 + 10 / 100)
    assert large.deadlines.deadline_s(large.lane) == FLOOR_S + FACTOR * (0.11 + 400 / 100)
    assert small.overdue_after(6.0) == [] and small.overdue_after(0.5) == [ONE]
    assert large.overdue_after(84.0) == [] and large.overdue_after(0.5) == [ONE]


def test_a_step_deep_in_a_long_prompt_may_take_longer() -> None:
    """What a worker tells of its prefill is without context, which can be most of a step."""
    watched = Watched(prompt=500)
    watched.lane.rates = Rates(prefill=100.0, decode_base_s=0.1, pair_s=1e-3)
    expected = 0.1 + 500 / 100 + 1e-3 * 500 * 500 / 2
    assert watched.deadlines.deadline_s(watched.lane) >= FLOOR_S + FACTOR * expected


def test_any_result_begins_a_new_deadline() -> None:
    watched = Watched()
    watched.lane.rates = Rates(prefill=1e6, decode_base_s=1e-6)
    assert watched.overdue_after(1.75) == []
    assert watched.overdue_after(1.75, answered=1) == []
    assert watched.overdue_after(0.75, answered=1) == [ONE]


def test_a_leader_that_saw_nothing_for_a_while_suspects_nobody() -> None:
    watched = Watched()
    watched.lane.rates = Rates(prefill=1e6, decode_base_s=1e-6)
    watched.overdue_after(1.0)
    watched.now += 60.0
    assert watched.overdue_after(1.75) == []


def test_a_floor_of_0_is_no_deadline() -> None:
    assert Watched(floor_s=0.0).overdue_after(1000.0) == []


def test_an_idle_worker_is_never_overdue() -> None:
    watched = Watched()
    watched.world.settle()
    assert not watched.lane.in_flight
    assert watched.overdue_after(1000.0) == []
