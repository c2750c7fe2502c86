"""Who goes first, who may pass, who is preempted (cases 76, 77, 78, 80, BEST-26)."""

from typing import Any

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.victims import choose_victim
from shared.errors import ConfigError
from shared.messages import EventKind
from tests.fakes.scheduler_world import World, make_submission
from tests.fakes.timed_pool import Arrival, TimedPool


def make_world(num_blocks: int, **config: Any) -> World:
    world = World(SchedulerConfig(**{"max_model_len": 200, "block_size": 4, "plan_ahead": 1, **config}))
    world.join("w", num_blocks)
    return world


def submit(world: World, name: str, size: int, max_tokens: int, **options: Any) -> None:
    """A request comes while a step runs; the step ends, and a plan is made."""
    world.submit(
        make_submission(name, [len(name) + ord(name[-1])] * size, max_tokens=max_tokens, ignore_eos=True, **options)
    )
    play(world)


def play(world: World, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        world.step("w")
        world.turn()


def waiting(world: World) -> list[str]:
    return [request.request_id for request in world.core.waiting]


# ---------------------------------------------------------------- priority


def test_a_smaller_priority_goes_next() -> None:
    """BEST-26: one slot, ten requests of priority 10 wait, then comes one of priority 0: it is the next."""
    world = make_world(40, policy=PolicyName.PRIORITY, max_num_seqs=1)
    submit(world, "running", 4, 20, priority=10)
    for index in range(10):
        submit(world, f"ten{index}", 4, 4, priority=10)
    submit(world, "zero", 4, 4, priority=0)
    world.settle()
    world.judge_idle()
    assert world.admissions == ["running", "zero", *(f"ten{index}" for index in range(10))]


def test_without_the_policy_a_priority_changes_nothing() -> None:
    world = make_world(40, max_num_seqs=1)
    submit(world, "first", 4, 20, priority=10)
    submit(world, "second", 4, 4, priority=10)
    submit(world, "zero", 4, 4, priority=-5)
    world.settle()
    assert world.admissions == ["first", "second", "zero"]


def test_queue_time_follows_the_class() -> None:
    """BEST-26: the effect of a priority can be measured, and it is that of the documented sign."""
    pool = TimedPool(SchedulerConfig(max_model_len=400, max_num_seqs=2, policy=PolicyName.PRIORITY), num_blocks=100)
    arrivals = [
        Arrival(
            0.01 * index, make_submission(f"r{index}", [index + 1] * 20, max_tokens=20, priority=(-1, 0, 1)[index % 3])
        )
        for index in range(60)
    ]
    pool.run(arrivals)
    queued = {-1: 0.0, 0: 0.0, 1: 0.0}
    for at, submission in arrivals:
        queued[submission.priority] += (pool.admitted[submission.request_id] - at) / 20
    assert queued[-1] * 2 < queued[0] and queued[0] * 1.3 < queued[1], queued


def test_ageing_bounds_what_a_bad_priority_waits() -> None:
    """Case 78: overload of priority 0 for ever, one request of priority 4: it passes all that came 4 × 0.5 s later."""
    config = SchedulerConfig(max_model_len=400, max_num_seqs=2, policy=PolicyName.PRIORITY, priority_ageing_s=0.5)
    pool = TimedPool(config, num_blocks=100)
    urgent = [Arrival(0.05 * i, make_submission(f"u{i}", [i + 1] * 20, max_tokens=20)) for i in range(200)]
    pool.run([*urgent, Arrival(1.0, make_submission("patient", [999] * 20, max_tokens=20, priority=4))])
    admitted = pool.admitted["patient"]
    later = [s.request_id for at, s in urgent if at > 3.0 and pool.admitted[s.request_id] < admitted]
    behind = [s.request_id for at, s in urgent if 1.0 < at < 2.9 and pool.admitted[s.request_id] > admitted]
    assert not later
    assert not behind, "the priority had no effect"
    assert admitted > 4.0, "there was no overload"


def test_the_worst_priority_is_preempted_but_never_the_oldest() -> None:
    world = make_world(40, policy=PolicyName.PRIORITY)
    for name, priority in (("oldest", 9), ("bad", 5), ("good", 0), ("better", -3)):
        submit(world, name, 4, 20, priority=priority)
    assert choose_victim(world.core, world.core.lanes["w"]).request.request_id == "bad"
    world.abort("bad")
    world.turn()
    assert choose_victim(world.core, world.core.lanes["w"]).request.request_id == "good"


def test_a_high_priority_that_lacks_blocks_takes_them_from_a_worse_one() -> None:
    world = make_world(9, policy=PolicyName.PRIORITY, enable_prefix_caching=False, admission_room=0)
    submit(world, "old", 8, 12, priority=5)
    submit(world, "worse", 8, 12, priority=5)
    submit(world, "urgent", 8, 12, priority=0)
    world.settle()
    world.judge_idle()
    preempted = [event.request_id for event in world.events if event.kind is EventKind.PREEMPTED]
    assert preempted[0] == "worse" and "old" not in preempted


# ---------------------------------------------------------------- those that ran resume first


@pytest.mark.parametrize("policy", PolicyName)
def test_a_preempted_request_resumes_before_fresh_ones_of_its_class(policy: PolicyName) -> None:
    """Case 80, blocks are the limit. `big` came before it and has not run: it was passed, and goes after it."""
    world = make_world(10, policy=policy, enable_prefix_caching=False, admission_room=0)
    submit(world, "old", 12, 24)
    submit(world, "big", 32, 4)
    submit(world, "small", 8, 24)
    submit(world, "fresh", 16, 4)
    assert [d.request_id for d in world.core.diagnostics() if d.worker] == ["old", "small"]
    while not world.num_preempted:
        play(world)
    assert waiting(world) == ["small", "big", "fresh"]
    world.settle()
    world.judge_idle()
    assert world.admissions.index("big") > world.admissions.index("small", 2)


@pytest.mark.parametrize("policy", PolicyName)
def test_requests_that_ran_resume_first_when_rows_are_the_limit(policy: PolicyName) -> None:
    """Case 80, rows are the limit: the worker died and comes back with a single row for five requests."""
    world = make_world(40, policy=policy, max_num_seqs=2)
    for name in ("a", "b", "c", "d", "e"):
        submit(world, name, 4, 20)
    play(world, 2)
    world.join("w", 40)
    submit(world, "late", 4, 20)
    world.settle()
    world.judge_idle()
    assert world.admissions == ["a", "b", "a", "b", "c", "d", "e", "late"]


def test_a_better_class_still_goes_before_one_that_ran() -> None:
    world = make_world(40, policy=PolicyName.PRIORITY, max_num_seqs=1)
    submit(world, "ran", 4, 20, priority=3)
    submit(world, "same", 4, 20, priority=3)
    play(world, 2)
    world.fence("w")
    world.turn()
    submit(world, "urgent", 4, 4, priority=1)
    assert waiting(world) == ["urgent", "ran", "same"]
    world.join("w", 40)
    world.settle()
    world.judge_idle()


# ---------------------------------------------------------------- bounded bypass


def test_small_requests_pass_a_big_one_a_bounded_number_of_times() -> None:
    """Case 76: 70 % of the pool is taken; one prompt of 40 % waits, then 20 small ones come."""
    world = make_world(
        100, max_model_len=400, max_bypasses=16, max_num_seqs=64, max_num_batched_tokens=400, admission_room=0
    )
    submit(world, "filler", 279, 100)
    submit(world, "big", 160, 8)
    for index in range(20):
        submit(world, f"small{index}", 4, 3)
    (big,) = [d for d in world.core.diagnostics() if d.request_id == "big"]
    assert big.reason == "blocks"
    world.settle()
    world.judge_idle()
    before_big = world.admissions[1 : world.admissions.index("big")]
    assert before_big == [f"small{index}" for index in range(16)]
    assert world.admissions[18:] == [f"small{index}" for index in range(16, 20)]
    assert world.bypasses["big"] == 16


def test_one_that_was_passed_often_enough_is_waited_for() -> None:
    """Case 77: it keeps its place, those behind it keep theirs, and diagnostics say whom they wait for."""
    world = make_world(30, max_bypasses=2, admission_room=0)
    submit(world, "filler", 60, 20)
    submit(world, "big", 80, 8)
    for index in range(5):
        submit(world, f"small{index}", 4, 4)
    assert waiting(world) == ["big", "small2", "small3", "small4"]
    told = {d.request_id: (d.reason, d.detail) for d in world.core.diagnostics()}
    assert told["big"][0] == "blocks" and told["big"][1].endswith("passed by 2 of at most 2")
    assert told["small2"] == told["small4"] == ("behind", "big goes first")
    world.settle()
    world.judge_idle()
    assert world.admissions == ["filler", "small0", "small1", "big", "small2", "small3", "small4"]


def test_nobody_passes_for_lack_of_rows_or_where_it_is_forbidden() -> None:
    for options in ({"max_num_seqs": 1}, {"max_bypasses": 0}):
        world = make_world(30, admission_room=0, **options)
        submit(world, "filler", 60, 40)
        submit(world, "big", 80, 8)
        submit(world, "small", 4, 4)
        world.settle()
        assert world.admissions == ["filler", "big", "small"]


def test_several_that_lack_blocks_keep_their_order() -> None:
    """Case 77: whoever passes, passes each of them, and each counts it."""
    world = make_world(30, max_bypasses=3, admission_room=0)
    submit(world, "filler", 60, 40)
    submit(world, "big1", 80, 8)
    submit(world, "small1", 4, 4)
    submit(world, "big2", 80, 8)
    for index in range(2, 6):
        submit(world, f"small{index}", 4, 4)
    world.settle()
    world.judge_idle()
    assert world.admissions == ["filler", "small1", "small2", "small3", "big1", "small4", "big2", "small5"]
    assert (world.bypasses["big1"], world.bypasses["big2"]) == (3, 3)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"priority_ageing_s": 0.0}, "priority_ageing_s"),
        ({"priority_ageing_s": float("nan")}, "priority_ageing_s"),
        ({"max_bypasses": -1}, "max_bypasses"),
        ({"tenant_weights": "a"}, "tenant_weights"),
        ({"tenant_weights": "a=0"}, "tenant_weights"),
        ({"tenant_weights": "a=1,a=2"}, "tenant_weights"),
        ({"tenant_weights": "a=inf"}, "tenant_weights"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SchedulerConfig(max_model_len=10, **options)
