"""Beam searches on a lane. Every result is compared with a search over lists by the world."""

from typing import Any

import msgspec
import pytest

from services.scheduler.core.config import SchedulerConfig
from shared.messages import CopyKind, EventKind, FinishReason, StepPlan, StepResult
from shared.packing import pack_float32, pack_int32
from tests.fakes.scheduler_world import World, make_submission


def make_world(num_blocks: int = 60, **config: Any) -> World:
    world = World(SchedulerConfig(**{"max_model_len": 200, "block_size": 4, "plan_ahead": 2, **config}))
    world.join("w", num_blocks)
    return world


def submit_search(
    world: World, name: str = "s", *, width: int = 3, num_prompt: int = 10, max_tokens: int = 14, **params: Any
) -> None:
    params = {"ignore_eos": True, "num_hypotheses": width, **params}
    prompt = range(1, num_prompt + 1)
    world.submit(make_submission(name, prompt, max_tokens=max_tokens, beam_width=width, **params))


def turns(world: World, count: int) -> None:
    for _ in range(count):
        world.turn()
        world.step("w")


def finish(world: World) -> None:
    world.settle()
    world.judge_idle()


@pytest.mark.parametrize("num_prompt", [7, 8, 9])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_search_finds_what_it_would_find_without_blocks(width: int, num_prompt: int) -> None:
    world = make_world()
    submit_search(world, width=width, num_prompt=num_prompt)
    world.submit(make_submission("other", [3] * 9, max_tokens=30, ignore_eos=True))
    finish(world)
    assert world.counts["beam searches"] == 1
    assert (world.counts["beam copies"] > 0) == (width > 1)
    ends = {end.request_id: end.final for end in world.ended}
    assert len(ends["s"].hypotheses) == width
    assert ends["s"].reason is FinishReason.LENGTH and ends["other"].reason is FinishReason.LENGTH


def test_beams_share_the_blocks_that_they_have_in_common() -> None:
    """Full blocks of the prompt lie there once; before the beams have parted much, so do those of the output."""
    world = make_world(num_blocks=60)
    submit_search(world, width=4, num_prompt=41, max_tokens=3)
    turns(world, 2)
    world.turn()
    assert world.core.stats().num_free_blocks == 60 - 10 - 4
    finish(world)


def test_others_are_planned_ahead_while_a_search_waits_for_its_candidates() -> None:
    world = make_world()
    world.submit(make_submission("other", [3] * 9, max_tokens=40, ignore_eos=True))
    submit_search(world)
    plans: list[StepPlan] = []
    for _ in range(12):
        world.turn()
        plans += world.workers["w"].inbox
        world.step("w")
    named = {plan.plan_id for plan in plans if plan.beams}
    assert len(named) >= 4
    assert not any(plan_id + 1 in named for plan_id in named), "with two plans in flight every second one names beams"
    assert world.core.lanes["w"].clock.num_rows == 1
    finish(world)


def test_a_search_needs_its_rows_at_once() -> None:
    world = make_world(max_num_seqs=4, max_bypasses=0)
    for index in range(2):
        world.submit(make_submission(f"r{index}", [3] * 5, max_tokens=6, ignore_eos=True))
    submit_search(world)
    world.submit(make_submission("late", [3] * 5, max_tokens=6, ignore_eos=True))
    world.turn()
    reasons = {diagnosis.request_id: diagnosis.reason for diagnosis in world.core.diagnostics()}
    assert (reasons["s"], reasons["late"]) == ("rows", "behind")
    finish(world)
    assert world.admissions == ["r0", "r1", "s", "late"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 9}, "9 beams need 9 sequences at once, but a worker takes 8"),
        ({"width": 4, "max_tokens": 100}, "4 beams may need 106 blocks, but the KV cache of the largest worker has 60"),
        ({"num_hypotheses": 4}, "4 results of 3 beams"),
        ({"num_hypotheses": 0}, "0 results of 3 beams"),
        ({"length_penalty": float("nan")}, "length_penalty nan"),
        ({"length_penalty": -1000.0}, "length_penalty -1000.0"),
    ],
)
def test_what_can_never_be_searched_is_rejected(changes: dict[str, Any], message: str) -> None:
    world = make_world(max_num_seqs=8)
    submit_search(world, **changes)
    world.turn()
    (end,) = world.ended
    assert end.final.reason is FinishReason.REJECTED and message in end.final.message
    finish(world)


def test_the_largest_search_that_fits_runs_alone_in_a_full_pool() -> None:
    """Never a victim, and no block too few: 2 shared ones and 3 tails of 4."""
    world = make_world(num_blocks=2 + 3 * 4, enable_prefix_caching=False)
    submit_search(world, width=3, num_prompt=9, max_tokens=15)
    world.submit(make_submission("newer", [3] * 5, max_tokens=30, ignore_eos=True))
    finish(world)
    assert [end.request_id for end in world.ended] == ["s", "newer"]
    assert world.core.stats().num_preemptions > 0, "the pool was never short"


def test_a_preempted_search_begins_again_with_its_prompt() -> None:
    world = make_world(num_blocks=14, enable_prefix_caching=False)
    world.submit(make_submission("old", [3] * 5, max_tokens=30, ignore_eos=True))
    submit_search(world, num_prompt=9, max_tokens=15)
    finish(world)
    events = [event for event in world.events if event.kind is EventKind.PREEMPTED]
    assert events and {event.request_id for event in events} == {"s"}
    assert all(event.num_output_tokens == 0 for event in events)
    assert world.counts["beam searches"] == 1


def test_a_stop_says_nothing_to_a_search() -> None:
    world = make_world()
    submit_search(world)
    turns(world, 4)
    world.stop("s", 2)
    world.turn()
    assert world.core.stats().num_ignored_messages == 1
    finish(world)
    assert world.counts["beam searches"] == 1


@pytest.mark.parametrize("num_turns", range(1, 9))
def test_an_aborted_search_gives_everything_back(num_turns: int) -> None:
    """While its prompt is computed, while beams are in flight, and in between."""
    world = make_world(max_num_batched_tokens=8)
    submit_search(world)
    world.submit(make_submission("other", [3] * 9, max_tokens=20, ignore_eos=True))
    turns(world, num_turns)
    world.abort("s")
    finish(world)
    ends = {end.request_id: end.final.reason for end in world.ended}
    assert ends == {"s": FinishReason.ABORT, "other": FinishReason.LENGTH}


@pytest.mark.parametrize("num_turns", range(1, 9))
def test_a_search_that_the_worker_cannot_compute_ends_alone(num_turns: int) -> None:
    world = make_world(max_num_batched_tokens=8)
    submit_search(world)
    world.submit(make_submission("other", [3] * 9, max_tokens=20, ignore_eos=True))
    turns(world, num_turns)
    world.fail("s")
    finish(world)
    ends = {end.request_id: end.final.reason for end in world.ended}
    assert ends == {"s": FinishReason.ERROR, "other": FinishReason.LENGTH}


@pytest.mark.parametrize("num_turns", range(1, 9))
def test_a_search_survives_a_restart_and_the_death_of_its_worker(num_turns: int) -> None:
    world = make_world(max_num_batched_tokens=8)
    submit_search(world)
    turns(world, num_turns)
    world.save()
    world.restart()
    turns(world, 3)
    world.restart()
    world.join("w", 60)
    finish(world)
    assert world.counts["beam searches"] == 1


def searching_world() -> tuple[World, StepResult]:
    """The next result has the candidates of two beams."""
    world = make_world(plan_ahead=1)
    submit_search(world, width=2)
    turns(world, 3)
    world.turn()
    result = world.workers["w"].step()
    assert len(result.candidates) == 2
    return world, result


def test_the_result_of_a_search_is_believed_as_it_came() -> None:
    world, result = searching_world()
    world.core.update_from_result(result)
    assert not world.core.broken_workers()


@pytest.mark.parametrize(
    "fault", ["none", "one", "another row", "a row twice", "unsound", "a token", "an ending by length", "ended and not"]
)
def test_a_result_against_the_beams_of_its_plan_marks_the_worker_as_broken(fault: str) -> None:
    world, result = searching_world()
    first, second = result.candidates
    changes: dict[str, dict[str, object]] = {
        "none": {"candidates": ()},
        "one": {"candidates": (first,)},
        "another row": {"candidates": (first, msgspec.structs.replace(second, row=5))},
        "a row twice": {"candidates": (first, first)},
        "unsound": {"candidates": (first, msgspec.structs.replace(second, logprobs=pack_float32([0.0])))},
        "a token": {"tokens": pack_int32([4])},
        "an ending by length": {"candidates": (first,), "ended": ((second.row, 3),)},
        "ended and not": {"ended": ((second.row, 4),)},
    }
    world.core.update_from_result(msgspec.structs.replace(result, **changes[fault]))
    assert world.core.broken_workers() == [("w", 1)]


def test_candidates_that_no_plan_asked_for_mark_the_worker_as_broken() -> None:
    world = make_world(plan_ahead=1)
    world.submit(make_submission("r", [3] * 9, max_tokens=20, ignore_eos=True))
    turns(world, 2)
    world.turn()
    _, other = searching_world()
    result = msgspec.structs.replace(world.workers["w"].step(), candidates=other.candidates)
    world.core.update_from_result(result)
    assert world.core.broken_workers() == [("w", 1)]


def test_a_plan_copies_a_block_only_where_two_beams_would_write_to_it() -> None:
    world = make_world(plan_ahead=1)
    submit_search(world, width=4, num_prompt=8)
    copied = opened = 0
    while not world.ended:
        world.turn()
        for plan in list(world.workers["w"].inbox):
            named = {beam.parent for beam in plan.beams}
            fresh = sum(beam.block != -1 for beam in plan.beams)
            assert fresh in (0, len(plan.beams) - len(named))
            copied, opened = copied + fresh, opened + len(plan.blocks) // 8 * bool(plan.beams)
        world.step("w")
    assert copied == world.workers["w"].num_copied[CopyKind.WITHIN] > 0
    assert opened >= 4 * 3, "every beam opens a block at each of three boundaries"
    finish(world)
