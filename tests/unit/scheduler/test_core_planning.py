"""What a plan holds, and when there is one."""

from collections.abc import Iterator
from typing import Any

from services.scheduler.core.config import SchedulerConfig
from shared.messages import EventKind, StepPlan, encode
from shared.packing import unpack_int32
from tests.fakes.scheduler_world import World, make_submission


def make_world(num_blocks: int, **config: Any) -> World:
    world = World(SchedulerConfig(**{"max_model_len": 200, "block_size": 4, "plan_ahead": 1, **config}))
    world.join("w", num_blocks)
    return world


def plans(world: World) -> Iterator[StepPlan]:
    """Play to the end; every plan as it is made."""
    while True:
        world.turn()
        inbox = world.workers["w"].inbox
        if not inbox:
            return
        yield inbox[-1]
        world.step("w")


def test_a_long_prompt_is_computed_in_chunks_of_what_the_budget_leaves() -> None:
    world = make_world(40, max_num_batched_tokens=8)
    world.submit(make_submission("short", [1] * 3, max_tokens=30, ignore_eos=True))
    world.submit(make_submission("long", [1] * 20, max_tokens=2, ignore_eos=True))
    chunks = [plan.chunks for plan in plans(world)][:5]
    assert chunks == [((0, 3), (1, 5)), ((1, 7),), ((1, 7),), ((1, 1),), ()]
    world.judge_idle()


def test_running_prefill_goes_before_newcomers() -> None:
    world = make_world(40, max_num_batched_tokens=8)
    world.submit(make_submission("first", [1] * 12, max_tokens=2))
    world.submit(make_submission("second", [1] * 12, max_tokens=2))
    first, second, *_ = plans(world)
    assert [new.request_id for new in first.added] == ["first"]
    assert second.chunks[0] == (0, 4)
    assert [new.request_id for new in second.added] == ["second"]


def test_a_length_ending_is_predicted() -> None:
    """No plan is made for a row after its last token, and no block is given to it, while results are still out."""
    world = make_world(40, plan_ahead=2)
    world.submit(make_submission("r", [1] * 4, max_tokens=5, ignore_eos=True))
    world.turn()
    num_plans = 0
    while world.step("w"):
        num_plans += 1
        world.turn()
    assert num_plans == 5
    assert world.core.stats().num_plans == 5
    world.judge_idle()


def test_plans_are_made_ahead_of_results() -> None:
    for plan_ahead in (1, 2):
        world = make_world(40, plan_ahead=plan_ahead)
        world.submit(make_submission("r", [1] * 4, max_tokens=30, ignore_eos=True))
        world.turn()
        assert len(world.workers["w"].inbox) == plan_ahead
        assert not world.core.can_plan


def test_a_decode_row_is_given_a_block_only_when_it_crosses_a_boundary() -> None:
    world = make_world(40)
    world.submit(make_submission("r", [1] * 6, max_tokens=12, ignore_eos=True))
    given = [len(unpack_int32(plan.blocks)) // 2 for plan in plans(world)]
    # 6 tokens in 2 blocks; the pass that computes the 9th and the 13th token needs one more, the 17th is the last.
    assert given == [2, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]


def test_a_steady_decode_plan_is_small() -> None:
    world = make_world(2000, block_size=16, max_num_seqs=64, plan_ahead=2)
    for index in range(64):
        world.submit(make_submission(f"r{index}", [1] * (5 + index), max_tokens=100, ignore_eos=True))
    sizes = [(len(encode(plan)), len(plan.blocks) // 8) for plan in plans(world) if not (plan.added or plan.chunks)]
    steady = [size - 8 * num_blocks for size, num_blocks in sizes]
    assert len(steady) > 80
    assert max(steady) <= 100


def test_preempts_newest_request_when_pool_is_full() -> None:
    world = make_world(7, enable_prefix_caching=False)
    for name in ("old", "new"):
        world.submit(make_submission(name, [1] * 8, max_tokens=12, ignore_eos=True))
    dropped = [plan.dropped for plan in plans(world)]
    assert world.core.stats().num_preemptions == 1
    events = [event for event in world.events if event.kind is EventKind.PREEMPTED]
    assert [event.request_id for event in events] == ["new"]
    assert [rows for rows in dropped if rows] == [(1,)]
    assert [end.request_id for end in world.ended] == ["old", "new"]
    world.judge_idle()


def test_a_preemption_waits_until_no_plan_is_in_flight() -> None:
    """Its committed tokens are exact then, and its blocks can be used in the very plan that drops it."""
    world = make_world(7, plan_ahead=2)
    for name in ("old", "new"):
        world.submit(make_submission(name, [1] * 8, max_tokens=12, ignore_eos=True))
    held_back = 0
    while not world.num_preempted:
        world.turn()
        lane = world.core.lanes["w"]
        held_back += len(lane.in_flight) == 1
        world.step("w")
    assert held_back, "no turn went without a plan ahead"
    (event,) = [event for event in world.events if event.kind is EventKind.PREEMPTED]
    assert event.num_output_tokens == len(world.readers["new"].tokens)
    world.settle()
    world.judge_idle()


def test_an_ending_in_flight_makes_a_preemption_unnecessary() -> None:
    world = make_world(5, plan_ahead=2, admission_room=0)
    world.submit(make_submission("ends", [1] * 8, max_tokens=2, ignore_eos=True))
    world.submit(make_submission("grows", [1] * 7, max_tokens=9, ignore_eos=True))
    world.settle()
    world.judge_idle()
    assert world.num_preempted == 0


def test_a_preempted_request_keeps_its_place() -> None:
    world = make_world(7, enable_prefix_caching=False)
    for name in ("old", "preempted"):
        world.submit(make_submission(name, [1] * 8, max_tokens=12, ignore_eos=True))
    while not world.num_preempted:
        world.turn()
        world.step("w")
    world.submit(make_submission("late", [1] * 8, max_tokens=2, ignore_eos=True))
    world.settle()
    assert world.admissions == ["old", "preempted", "preempted", "late"]
    world.judge_idle()


def test_an_admission_leaves_room_for_those_that_run() -> None:
    tight, roomy = (make_world(9, max_num_seqs=8, admission_room=room) for room in (0, 16))
    for world in (tight, roomy):
        for index in range(4):
            world.submit(make_submission(f"r{index}", [1] * 7, max_tokens=9, ignore_eos=True))
        world.settle()
        world.judge_idle()
    assert roomy.num_preempted < tight.num_preempted


def test_a_row_is_not_reused_in_the_plan_that_drops_it() -> None:
    world = make_world(40, max_num_seqs=1)
    world.submit(make_submission("gone", [1] * 4, max_tokens=50, ignore_eos=True))
    world.submit(make_submission("next", [1] * 4, max_tokens=2, ignore_eos=True))
    made = []
    for plan in plans(world):
        made.append(plan)
        if len(made) == 3:
            world.abort("gone")
    dropping = next(plan for plan in made if plan.dropped)
    adding = next(plan for plan in made if any(new.request_id == "next" for new in plan.added))
    assert (dropping.dropped, dropping.chunks) == ((0,), ())
    assert adding.plan_id == dropping.plan_id + 1
    assert adding.added[0].row == 0


def test_rows_are_numbered_from_the_lowest_free_one() -> None:
    world = make_world(80, max_num_seqs=8)
    for index in range(4):
        tokens = 2 if index in (1, 2) else 30
        world.submit(make_submission(f"r{index}", [1] * 4, max_tokens=tokens, ignore_eos=True))
    for _ in range(3):
        world.turn()
        world.step("w")
    world.submit(make_submission("later", [1] * 4, max_tokens=3, ignore_eos=True))
    world.turn()
    assert [new.row for new in world.workers["w"].inbox[-1].added] == [1]


def test_rows_never_exceed_the_token_budget() -> None:
    """Every decode row is in every pass, so the budget bounds them too."""
    world = make_world(80, max_num_seqs=8, max_num_batched_tokens=3)
    for index in range(6):
        world.submit(make_submission(f"r{index}", [1] * 5, max_tokens=10, ignore_eos=True))
    most = 0
    for _ in plans(world):
        most = max(most, world.core.stats().num_running)
    assert most == 3
    world.judge_idle()


def test_history_is_emptied_while_a_request_runs() -> None:
    world = World(SchedulerConfig(max_model_len=1000, block_size=16, max_num_seqs=4))
    world.join("w", 60)
    world.submit(make_submission("r", [1] * 4, max_tokens=700, ignore_eos=True))
    world.settle()
    world.judge_idle()
    assert len(world.readers["r"].tokens) == 700
    assert world.core.lanes["w"].history.base > 256
