"""Preemption by swap, the cost model, demotion: each by itself. Together: tests/property/test_cpu_tier.py."""

from typing import Any

import msgspec
import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import Preemption, swap_is_cheaper
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.rates import Rates, newest_rates
from services.scheduler.core.request import RequestState
from services.scheduler.core.snapshot import restore, take_snapshot
from shared.messages import CopyKind, FinishReason
from tests.fakes.content_worker import reference_output
from tests.fakes.drawn_rates import BLOCK_BYTES
from tests.fakes.scheduler_world import World, make_submission


def make_world(
    num_blocks: int = 7,
    num_cpu_blocks: int = 8,
    *,
    copy_rate: float = 0.0,
    workers: tuple[str, ...] = ("w",),
    **config: Any,
) -> World:
    options: dict[str, Any] = {"max_model_len": 200, "block_size": 4, "plan_ahead": 1, "enable_prefix_caching": False}
    world = World(SchedulerConfig(**{**options, "preemption": Preemption.SWAP, **config}))
    for name in workers:
        world.join(name, num_blocks, num_cpu_blocks, rates=[(100.0, 0.0, 0.0, copy_rate)])
    return world


def submit(world: World, *names: str) -> None:
    """Two of these need 10 blocks at their end; each fits alone."""
    for number, name in enumerate(names):
        world.submit(make_submission(name, [1 + number] * 8, max_tokens=12, ignore_eos=True))


def run_until_swapped(world: World) -> None:
    for _ in range(60):
        world.turn()
        if world.num_swapped:
            return
        for name in list(world.workers):
            world.step(name)
    raise AssertionError("nobody was swapped out")


def texts_are_right(world: World) -> None:
    world.settle()
    world.judge_idle()
    for end in world.ended:
        if end.final.reason is FinishReason.LENGTH:
            reference, _ = reference_output(world.records[end.request_id])
            assert world.readers[end.request_id].tokens == reference


def state_of(world: World, name: str) -> RequestState:
    return world.core.requests[name].state


@pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
def test_four_requests_in_a_small_pool_have_their_own_texts(preemption: Preemption) -> None:
    """BEST-24: at least three preemptions, by swap and by recompute; every text is the one it has alone."""
    world = make_world(12, 40, preemption=preemption, admission_room=0)
    for number, name in enumerate("abcd"):
        world.submit(make_submission(name, [1 + number] * 8, max_tokens=32, ignore_eos=True))
    texts_are_right(world)
    stats = world.core.stats()
    assert stats.num_preemptions >= 3
    assert (stats.num_swap_outs > 0) == (preemption is Preemption.SWAP)
    assert stats.num_swap_outs == stats.num_swap_ins
    copied = world.workers["w"].num_copied
    assert copied[CopyKind.OUT] == copied[CopyKind.IN] == stats.num_swap_outs


def test_a_swapped_request_comes_back_with_one_token_to_compute() -> None:
    world = make_world()
    submit(world, "old", "new")
    run_until_swapped(world)
    assert state_of(world, "new") is RequestState.SWAPPED
    plan = world.workers["w"].inbox[-1]
    known = world.core.requests["new"].num_tokens
    assert plan.dropped == (1,)
    assert [copy.kind for copy in plan.copies] == [CopyKind.OUT]
    assert len(plan.copies[0].pairs) // 8 == world.config.blocks_for(known - 1)
    while not world.num_back:
        world.step("w")
        world.turn()
    back = world.workers["w"].inbox[-1]
    assert [(new.request_id, new.num_computed_tokens) for new in back.added] == [("new", known - 1)]
    assert [copy.kind for copy in back.copies] == [CopyKind.IN] and back.chunks == ((back.added[0].row, 1),)
    texts_are_right(world)


def test_nobody_is_admitted_before_a_swapped_request_of_the_worker() -> None:
    world = make_world()
    submit(world, "old", "new")
    run_until_swapped(world)
    world.submit(make_submission("tiny", [9], max_tokens=1, ignore_eos=True))
    world.step("w")
    world.turn()
    reasons = {diagnosis.request_id: diagnosis.reason for diagnosis in world.core.diagnostics()}
    assert reasons == {"old": "", "new": "swapped", "tiny": "behind"}
    assert world.core.stats().num_swapped == 1 and world.core.stats().num_running == 1
    texts_are_right(world)


@pytest.mark.parametrize("num_cpu_blocks", [0, 2])
def test_without_room_on_the_host_the_victim_is_recomputed(num_cpu_blocks: int) -> None:
    world = make_world(num_cpu_blocks=num_cpu_blocks)
    submit(world, "old", "new")
    texts_are_right(world)
    assert world.core.stats().num_preemptions and not world.num_swapped


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_a_request_may_end_while_it_is_swapped(end: str) -> None:
    world = make_world()
    submit(world, "old", "new")
    run_until_swapped(world)
    if end == "abort":
        world.abort("new")
    else:
        world.stop("new", len(world.readers["new"].tokens))
    world.step("w")
    world.turn()
    assert "new" not in world.core.requests
    stats = world.core.stats()
    assert stats.num_free_cpu_blocks == stats.num_cpu_blocks
    texts_are_right(world)


@pytest.mark.parametrize("event", ["fence", "drain"])
def test_a_swapped_request_begins_again_elsewhere_if_its_worker_goes(event: str) -> None:
    world = make_world()
    submit(world, "old", "new")
    run_until_swapped(world)
    world.join("other", 7, 8)
    world.turn()
    getattr(world, event)("w")
    world.turn()
    request = world.core.requests["new"]
    assert request.state is not RequestState.SWAPPED and request.swapped is None
    assert world.core.stats().num_requeues >= 1
    texts_are_right(world)
    assert not world.num_back


def test_a_worker_that_drains_alone_takes_its_swapped_requests_back() -> None:
    world = make_world()
    submit(world, "old", "new")
    run_until_swapped(world)
    world.drain("w")
    world.turn()
    assert state_of(world, "new") is RequestState.SWAPPED
    while not world.num_back and world.step("w"):
        world.turn()
    assert world.num_back == 1


def test_a_snapshot_holds_what_is_swapped_and_demoted() -> None:
    world = make_world(9, 24, enable_prefix_caching=True)
    submit(world, "first", "second", "third")
    run_until_swapped(world)
    assert world.core.stats().num_cached_cpu_blocks or world.core.stats().num_swapped
    data = take_snapshot(world.core)
    core = restore(data, world.config, world.records)
    core.check_integrity()
    assert take_snapshot(core) == data and core.stats() == world.core.stats()
    world.core = core
    texts_are_right(world)


# ---------------------------------------------------------------- the cost model


@pytest.mark.parametrize(
    ("copy_rate", "is_swapped"),
    [(0.0, False), (10 * BLOCK_BYTES, False), (1000 * BLOCK_BYTES, True)],
    ids=["unknown", "slow", "fast"],
)
def test_auto_goes_by_the_rates_that_the_worker_measured(copy_rate: float, is_swapped: bool) -> None:
    """100 tokens/s are prefilled, so 4 blocks of 4 tokens take 0.16 s to compute again, and 8 copies to swap."""
    world = make_world(copy_rate=copy_rate, preemption=Preemption.AUTO)
    submit(world, "old", "new")
    texts_are_right(world)
    assert world.core.stats().num_preemptions and (world.num_swapped > 0) is is_swapped


def test_swap_pays_if_copying_twice_is_faster_than_computing() -> None:
    rates = Rates(prefill=1000.0, copy=1e6)
    assert swap_is_cheaper(num_tokens=100, num_blocks=7, block_bytes=7000, rates=rates)
    assert not swap_is_cheaper(num_tokens=100, num_blocks=7, block_bytes=7500, rates=rates)
    assert not swap_is_cheaper(num_tokens=100, num_blocks=7, block_bytes=0, rates=rates)
    assert not swap_is_cheaper(num_tokens=100, num_blocks=7, block_bytes=1, rates=Rates(prefill=1000.0))
    with_context = rates._replace(pair_s=1e-6)  # 100 tokens behind 1,000 others take 105 ms more
    assert swap_is_cheaper(num_tokens=100, num_before=1000, num_blocks=7, block_bytes=14500, rates=with_context)
    assert not swap_is_cheaper(num_tokens=100, num_before=1000, num_blocks=7, block_bytes=15000, rates=with_context)


def test_a_rate_that_is_not_told_stays_as_it_was() -> None:
    known = newest_rates(Rates(), (1.0, 2.0, 3.0, 4.0))
    assert newest_rates(known, (5.0, 0.0, 0.0, 0.0)) == Rates(5.0, 2.0, 3.0, 4.0)
    assert newest_rates(known, (0.0, 6.0, 0.0, 0.0)) == Rates(1.0, 6.0, 0.0, 4.0), "base and row are one line"
    assert newest_rates(known, (float("nan"), 1.0, 1.0, 1.0)) == known


# ---------------------------------------------------------------- demotion


def demoting_world(num_cpu_blocks: int, **config: Any) -> World:
    """6 blocks; each prompt of `serve` fills 4 of them."""
    return make_world(6, num_cpu_blocks, enable_prefix_caching=True, **config)


def serve(world: World, name: str, first: int) -> int:
    """Alone, to its end; the prompt tokens that were cached."""
    world.submit(make_submission(name, [first] * 17, max_tokens=2, ignore_eos=True))
    world.settle()
    return world.cached.get(name, 0)


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    world = demoting_world(8)
    assert [serve(world, name, first) for name, first in (("a", 1), ("b", 2), ("c", 3))] == [0, 0, 0]
    assert world.core.stats().num_demotions >= 4
    assert serve(world, "a again", 1) == 16
    assert world.core.stats().num_promotions == 4
    world.judge_idle()


def test_without_demotion_or_host_it_is_computed_again() -> None:
    for world in (demoting_world(8, demotion=False), demoting_world(0)):
        for name, first in (("a", 1), ("b", 2), ("c", 3)):
            serve(world, name, first)
        assert serve(world, "a again", 1) == 0
        assert world.core.stats().num_demotions == world.core.stats().num_promotions == 0
        world.judge_idle()


def test_a_full_host_forgets_what_was_demoted_first() -> None:
    world = demoting_world(4)
    for name, first in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        serve(world, name, first)
    assert world.core.stats().num_cached_cpu_blocks == 4
    assert serve(world, "a again", 1) == 0
    world.judge_idle()


def test_a_swapped_request_displaces_demoted_blocks_and_never_the_other_way_round() -> None:
    world = make_world(7, 4, enable_prefix_caching=True)
    serve(world, "a", 8)
    serve(world, "b", 9)
    assert world.core.stats().num_cached_cpu_blocks
    submit(world, "old", "new")
    run_until_swapped(world)
    pinned = world.core.requests["new"].swapped
    assert pinned is not None and len(pinned.slots) > world.core.stats().num_free_cpu_blocks
    texts_are_right(world)


def steps_until_served(preemption: Preemption, policy: PolicyName, newcomer: dict[str, Any]) -> tuple[int, int]:
    """Steps that a small request takes which comes when somebody had to go; how many were swapped before."""
    world = make_world(30, 100, max_num_seqs=8, max_model_len=400, policy=policy, preemption=preemption)
    for number in range(4):
        many = make_submission(
            f"a{number}", [1 + number] * 12, max_tokens=80, min_tokens=80, ignore_eos=True, tenant="a"
        )
        world.submit(msgspec.structs.replace(many, priority=5))
    while not world.core.counters.preemptions:
        world.turn()
        world.step("w")
    num_swapped = world.num_swapped
    small = make_submission("small", [9] * 3, max_tokens=4, min_tokens=4, ignore_eos=True)
    world.submit(msgspec.structs.replace(small, **newcomer))
    num_steps = 0
    while world.readers["small"].terminal is None:
        world.turn()
        num_steps += world.step("w")
        world.turn()
    texts_are_right(world)
    return num_steps, num_swapped


@pytest.mark.parametrize(
    ("policy", "newcomer"), [(PolicyName.PRIORITY, {"priority": -100}), (PolicyName.FAIR, {"tenant": "b"})]
)
def test_a_swap_does_not_turn_the_policy_around(policy: PolicyName, newcomer: dict[str, Any]) -> None:
    """One that goes before whoever was swapped is served as soon as if that one had been preempted by recompute."""
    by_recompute, none_swapped = steps_until_served(Preemption.RECOMPUTE, policy, newcomer)
    by_swap, num_swapped = steps_until_served(Preemption.SWAP, policy, newcomer)
    assert num_swapped > none_swapped == 0
    assert by_swap <= by_recompute + 2


def test_within_a_class_what_was_swapped_goes_first() -> None:
    num_steps, num_swapped = steps_until_served(Preemption.SWAP, PolicyName.FCFS, {"tenant": "b"})
    assert num_swapped and num_steps > 10


def two_beside_a_swapped(policy: PolicyName) -> World:
    """Worker "w" decodes two requests; "new" is swapped out there."""
    world = make_world(12, 12, policy=policy, admission_room=0)
    submit(world, "old", "middle", "new")
    run_until_swapped(world)
    assert state_of(world, "new") is RequestState.SWAPPED and len(world.core.lanes["w"].seats) == 2
    return world


def copies_are_kept(world: World, first: dict[str, Any], num_tokens: int = 3) -> None:
    """`first` goes before "new", and does not enter: so it is not worth the copies."""
    submission = make_submission("first", [9] * num_tokens, max_tokens=4, ignore_eos=True)
    world.submit(msgspec.structs.replace(submission, **first))
    for _ in range(2):
        assert world.step("w")
        world.turn()
        assert state_of(world, "new") is RequestState.SWAPPED
        assert world.core.requests["first"].seat is None
    texts_are_right(world)
    assert world.num_back == world.num_swapped and not world.core.stats().num_requeues


def test_copies_are_kept_if_the_one_that_goes_before_goes_to_another_worker() -> None:
    world = two_beside_a_swapped(PolicyName.PRIORITY)
    world.join("other", 30, 8)
    submit(world, "busy")
    world.turn()
    assert [seat.request.request_id for seat in world.core.lanes["other"].seats.values()] == ["busy"]
    copies_are_kept(world, {"priority": -100})


def test_copies_are_kept_if_a_claim_cannot_be_met() -> None:
    """All that may be taken would not be enough for it."""
    copies_are_kept(two_beside_a_swapped(PolicyName.FAIR), {"tenant": "b"}, num_tokens=36)
