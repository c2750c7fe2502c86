"""Choices of one prompt: it is computed and stored once per worker, whatever the prefix cache may do."""

from typing import Any

import pytest

from services.scheduler.core.config import SchedulerConfig
from shared.messages import CopyKind, FinishReason, StepPlan
from shared.records import choice_id
from tests.fakes.scheduler_world import World, make_submission


def make_world(num_blocks: int = 60, **config: Any) -> World:
    world = World(SchedulerConfig(**{"max_model_len": 200, "block_size": 4, "plan_ahead": 1, **config}))
    world.join("w", num_blocks)
    return world


def submit_choices(world: World, n: int, num_prompt: int, group: str = "g", **params: Any) -> None:
    for choice in range(n):
        params = {"max_tokens": 12, "ignore_eos": True, **params}
        submission = make_submission(
            choice_id(group, choice), range(1, num_prompt + 1), choice=choice, group=group, **params
        )
        world.submit(submission)


def play(world: World, worker: str = "w") -> list[StepPlan]:
    """To the end; every plan of the worker."""
    plans: list[StepPlan] = []
    while True:
        world.turn()
        inboxes = {name: other.inbox for name, other in world.workers.items() if other.inbox}
        if not inboxes:
            break
        plans += [inbox[-1] for name, inbox in inboxes.items() if name == worker]
        for name in inboxes:
            world.step(name)
    world.judge_idle()
    return plans


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_prompt", [9, 10, 12, 13])
def test_a_prompt_is_computed_once_for_four_choices(num_prompt: int, caching: bool) -> None:
    """BEST-28: prompt lengths at a block's end and one beside it, cache on and off (the world checks each text)."""
    world = make_world(enable_prefix_caching=caching)
    submit_choices(world, 4, num_prompt)
    plans = play(world)
    assert sum(size for plan in plans for _, size in plan.chunks) == num_prompt + 3
    assert len({tuple(world.readers[choice_id("g", k)].tokens) for k in range(4)}) == 4, "the choices do not differ"
    stats = world.core.stats()
    assert (stats.num_forks, stats.num_forked_blocks) == (3, 3 * ((num_prompt - 1) // 4))
    num_copied = world.workers["w"].num_copied[CopyKind.WITHIN]
    assert num_copied == (3 if (num_prompt - 1) % 4 else 0)


def test_choices_share_the_blocks_of_their_prompt() -> None:
    world = make_world(num_blocks=20, enable_prefix_caching=False)
    submit_choices(world, 4, 30)
    world.turn()
    world.step("w")
    world.turn()
    assert world.core.stats().num_running == 4
    assert world.core.stats().num_free_blocks == 20 - 8 - 3  # 8 for the prompt, and a last one of their own for three
    play(world)


def test_a_choice_waits_for_its_siblings_prefill_in_nobodys_way() -> None:
    world = make_world(max_num_batched_tokens=8)
    submit_choices(world, 2, 21)
    world.submit(make_submission("other", [1] * 3, max_tokens=2))
    world.turn()
    world.step("w")
    reasons = {diagnosis.request_id: diagnosis.reason for diagnosis in world.core.diagnostics()}
    assert reasons == {"g": "", "g#1": "sibling", "other": "next_plan"}
    plans = play(world)
    added = [new.request_id for plan in plans for new in plan.added]
    assert added == ["other", "g#1"]


def test_without_a_seated_sibling_a_choice_is_admitted_like_any_request() -> None:
    world = make_world(max_num_seqs=1, enable_prefix_caching=False)
    submit_choices(world, 2, 9)
    plans = play(world)
    assert [new.num_computed_tokens for plan in plans for new in plan.added] == [0, 0]
    assert world.core.stats().num_forks == 0


def test_a_full_worker_does_not_keep_choices_from_an_idle_one() -> None:
    """The prompt is computed once on each of them."""
    world = make_world(max_num_seqs=2)
    world.join("idle", 60)
    submit_choices(world, 4, 30)
    plans = play(world, "idle")
    assert sum(size for plan in plans for _, size in plan.chunks) == 31
    assert world.core.stats().num_forks == 2


def test_a_draining_worker_takes_no_fork() -> None:
    world = make_world(max_num_batched_tokens=8)
    submit_choices(world, 2, 21)
    world.turn()
    world.drain("w")
    world.turn()
    reasons = {diagnosis.request_id: diagnosis.reason for diagnosis in world.core.diagnostics()}
    assert reasons["g#1"] != "sibling"
    world.join("other", 60)
    assert not world.core.stats().num_forks
    # The one that ran there moves: without output yet it forks from its sibling, which came first.
    assert [new.request_id for plan in play(world, "other") for new in plan.added] == ["g#1", "g"]


def test_a_group_gives_no_access_to_another_tenants_blocks() -> None:
    world = make_world()
    for choice, tenant in enumerate(("a", "b")):
        prompt = range(1, 10)
        world.submit(
            make_submission(choice_id("g", choice), prompt, max_tokens=5, group="g", tenant=tenant, ignore_eos=True)
        )
    plans = play(world)
    assert [new.num_computed_tokens for plan in plans for new in plan.added] == [0, 0]


def test_a_choice_with_output_is_no_fork_when_it_comes_back() -> None:
    """Its worker died; what it had is prefilled, and its sibling's blocks are hit by the cache, full ones only."""
    world = make_world()
    submit_choices(world, 2, 10, max_tokens=20)
    for _ in range(6):
        world.turn()
        world.step("w")
    world.join("w", 60)
    plans = play(world)
    entered = {new.request_id: new.num_computed_tokens for plan in plans for new in plan.added}
    assert entered["g"] == 0 and entered["g#1"] % 4 == 0
    assert world.core.stats().num_forks == 1


@pytest.mark.parametrize("victim", ["g", "g#1"])
def test_an_ending_sibling_leaves_the_others_their_blocks(victim: str) -> None:
    """BEST-09 for forks: a choice is aborted while blocks are shared, and new work comes."""
    world = make_world(num_blocks=24, plan_ahead=2)
    submit_choices(world, 3, 22, max_tokens=16)
    for _ in range(4):
        world.turn()
        world.step("w")
    assert world.core.stats().num_forks == 2
    world.abort(victim)
    world.submit(make_submission("new", [9] * 20, max_tokens=16, ignore_eos=True))
    play(world)
    ends = {end.request_id: end.final.reason for end in world.ended}
    assert ends.pop(victim) == FinishReason.ABORT
    assert set(ends.values()) == {FinishReason.LENGTH}


def test_a_fork_is_no_cache_hit() -> None:
    world = make_world()
    submit_choices(world, 3, 10)
    play(world)
    assert world.core.stats().prefix_cache_queries == 10
    assert not world.cached
    assert {end.final.num_cached_tokens for end in world.ended} == {0}
