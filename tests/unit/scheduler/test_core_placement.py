"""Which worker takes a request, and what those that wait are told."""

import random
from collections import Counter
from typing import Any

import pytest

from services.scheduler.core import admission
from services.scheduler.core.admission import EmptyLanes
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.lane import Lane
from services.scheduler.core.placement import Placement
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.request import Request
from tests.fakes.scheduler_world import World, make_submission


def make_world(*workers: str, num_blocks: int = 40, **config: Any) -> World:
    world = World(SchedulerConfig(**{"max_model_len": 100, "block_size": 4, "plan_ahead": 1, **config}))
    for name in workers:
        world.join(name, num_blocks)
    return world


def submit(world: World, name: str, size: int = 4, max_tokens: int = 30) -> None:
    world.submit(make_submission(name, [1] * size, max_tokens=max_tokens, ignore_eos=True))


def workers_of(world: World) -> dict[str, str]:
    return {d.request_id: d.worker for d in world.core.diagnostics() if d.worker}


def test_a_burst_is_spread_and_still_prefilled_together() -> None:
    world = make_world("w0", "w1")
    for index in range(8):
        submit(world, f"r{index}")
    world.turn()
    assert Counter(workers_of(world).values()) == {"w0": 4, "w1": 4}
    assert [len(worker.inbox[0].added) for worker in world.workers.values()] == [4, 4]


def test_a_worker_too_full_for_one_request_still_takes_a_smaller_one() -> None:
    world = make_world()
    world.join("small", 5)
    world.join("large", 40)
    world.turn()
    for name, size in (("first", 9), ("second", 40), ("third", 9), ("fourth", 3)):
        submit(world, name, size=size, max_tokens=6)
    world.turn()
    assert workers_of(world) == {"first": "small", "second": "large", "third": "large", "fourth": "small"}


def test_a_trial_counts_what_a_preferred_worker_took() -> None:
    """The preferred worker takes one out of turn; the others go to whoever has least then."""
    world = make_world("w0", "w1")
    world.turn()
    lanes = world.core.lanes
    placement = Placement(lanes.values(), world.config)
    requests = [Request(make_submission(f"r{index}", [1] * 4, max_tokens=5), arrival=index) for index in range(5)]
    assert placement.place(requests[0]) is lanes["w0"]
    assert placement.place(requests[1], preferred=lanes["w0"]) is lanes["w0"]
    assert [placement.place(request) for request in requests[2:]] == [lanes["w1"], lanes["w1"], lanes["w0"]]


def test_a_newcomer_goes_to_the_least_loaded_worker_even_if_another_answers_first() -> None:
    world = make_world("w0", "w1")
    for index in range(4):
        submit(world, f"r{index}", max_tokens=30 if index % 2 else 4)
    for _ in range(6):
        world.turn()
        world.step("w0")
        world.step("w1")
    assert Counter(workers_of(world).values()) == {"w1": 2}
    world.turn()
    submit(world, "new")
    world.step("w1")
    world.turn()
    assert workers_of(world)["new"] == "w0"


def test_a_hung_worker_does_not_hold_newcomers_back() -> None:
    world = make_world("w0", "w1")
    for index in range(3):
        submit(world, f"r{index}")
    world.turn()
    submit(world, "new")
    loads = Counter(workers_of(world).values())
    assert loads == {"w0": 2, "w1": 1}
    turns = 0
    while "new" not in workers_of(world):
        turns += 1
        world.step("w0")
        world.turn()
    assert workers_of(world)["new"] == "w0"
    assert 3 < turns < 12, "neither at once nor never"


def test_many_workers_serve_everything() -> None:
    world = make_world("w0", "w1", "w2", num_blocks=12, plan_ahead=2)
    for index in range(30):
        submit(world, f"r{index}", size=3 + index % 7, max_tokens=5 + index % 11)
    world.settle()
    world.judge_idle()
    assert world.num_preempted > 0


def test_every_waiting_request_has_a_reason() -> None:
    world = make_world()
    submit(world, "r")
    world.turn()
    (waits,) = world.core.diagnostics()
    assert (waits.state, waits.reason) == ("waiting", "no_worker")


def test_the_first_in_line_is_told_what_lacks_and_others_whom_they_wait_for() -> None:
    world = make_world("w", num_blocks=10, max_bypasses=0)
    submit(world, "big", size=30, max_tokens=10)
    submit(world, "first", size=20, max_tokens=20)
    submit(world, "second")
    world.turn()
    running, first, second = world.core.diagnostics()
    assert (running.request_id, running.worker, running.row) == ("big", "w", 0)
    assert (first.reason, second.reason) == ("blocks", "behind")
    assert "needs a row and 6 blocks" in first.detail
    assert "w lacks blocks (2 blocks free)" in first.detail
    assert second.detail == "first goes first"


def test_rows_may_be_what_lacks() -> None:
    world = make_world("w", max_num_seqs=1)
    submit(world, "a")
    submit(world, "b")
    world.turn()
    assert [d.reason for d in world.core.diagnostics()] == ["", "rows"]


def test_a_request_that_only_the_next_plan_is_missing_for_says_so() -> None:
    world = make_world("w")
    submit(world, "a")
    world.turn()
    submit(world, "b")
    world.turn()
    assert [d.reason for d in world.core.diagnostics()] == ["", "next_plan"]


@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_lane_is_found_as_by_asking_every_one(seed: int) -> None:
    """Placing asks only the least loaded lanes and those with hits: the choice is that of asking all of them."""
    chance = random.Random(seed)
    config = SchedulerConfig(max_model_len=512, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    world = World(config)
    for number in range(7):
        world.join(f"w{number}", num_blocks=chance.choice((12, 40)))
    prefixes = [[1 + (start + position) % 20 for position in range(24)] for start in range(3)]
    num_placed = 0
    for number in range(60):
        prompt = [*chance.choice(prefixes)[: chance.randrange(1, 24)], chance.randrange(1, 24)]
        world.submit(make_submission(f"r{number}", prompt, max_tokens=chance.randrange(1, 20)))
        world.turn()
        for name in [*world.workers]:
            if chance.random() < 0.5:
                world.step(name)
        placement = Placement(world.core.lanes.values(), config)
        for request in [*world.core.requests.values()]:
            if request.seat is None:
                expected = _by_asking_all(placement, request)
                assert placement.place(request) is expected
                num_placed += expected is not None
        for index in range(12):
            request = Request(make_submission(f"q{number}-{index}", chance.choice(prefixes)[:13], max_tokens=4), index)
            expected = _by_asking_all(placement, request)
            assert placement.place(request) is expected
            num_placed += expected is not None
    assert num_placed > 60


def _by_asking_all(placement: Placement, request: Request) -> Lane | None:
    found = [
        ((trial.load + placement._need(trial.lane, request).num_tokens, *trial.order), trial.lane)
        for trial in placement._trials.values()
        if placement._takes(trial, request)
    ]
    return min(found, key=lambda pair: pair[0])[1] if found else None


class Counted(Placement):
    """Counts the trials of all workers."""

    num_made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Counted.num_made += 1


@pytest.fixture(autouse=True)
def _count_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "Placement", Counted)


def test_one_look_at_the_queue_tells_which_empty_workers_have_a_plan() -> None:
    """Every empty worker looked for itself, and built a trial of all workers each time."""
    world = make_world(*(f"w{number}" for number in range(16)))
    for index in range(16):
        world.submit(make_submission(f"r{index}", [1 + index] * 30, max_tokens=2))
    world.settle()
    Counted.num_made = 0
    world.submit(make_submission("again", [16] * 30, max_tokens=2))
    world.turn()
    assert workers_of(world) == {"again": "w15"}, "its prefix lies there"
    assert Counted.num_made == 3, "the first worker's, all others', and that of the plan"


@pytest.mark.parametrize("policy", PolicyName)
def test_plans_are_those_of_workers_that_each_look_for_themselves(
    policy: PolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests, num_trials = [], []
    for all_look in (False, True):
        if all_look:
            monkeypatch.setattr(EmptyLanes, "may_have_plan", lambda self, lane: True)
        Counted.num_made = 0
        rng = random.Random(5)
        names = [f"w{number}" for number in range(8)]
        world = make_world(*names, num_blocks=24, plan_ahead=2, max_num_seqs=3, policy=policy)
        for index in range(50):
            prompt = [1 + rng.randrange(3)] * rng.randint(3, 60)
            group = f"g{index}" if index % 7 == 0 else ""
            for choice in range(2 if group else 1):
                whose: dict[str, Any] = {"group": group, "priority": index % 3, "tenant": "ab"[index % 2]}
                length = rng.randint(1, 12)
                world.submit(make_submission(f"r{index}#{choice}", prompt, max_tokens=length, **whose))
            world.turn()
            for name in names:
                if rng.random() < 0.7:
                    world.step(name)
        world.settle()
        world.judge_idle()
        digests.append(world.digest)
        num_trials.append(Counted.num_made)
    assert digests[0] == digests[1]
    assert num_trials[0] < num_trials[1]
