"""Snapshot and restore: exact, or refused."""

from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.saved import UnusableSnapshot
from services.scheduler.core.saved_pool import GONE
from services.scheduler.core.snapshot import (
    num_changed_blocks,
    read_core,
    restore,
    restore_core,
    save_changed_blocks,
    save_core,
    take_snapshot,
)
from shared.packing import pack_int32
from tests.fakes.scheduler_world import World, make_submission

CONFIG = SchedulerConfig(max_model_len=100, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)


def busy_world(**options: Any) -> World:
    """Something of everything: rows that decode, prefill, wait, were preempted or aborted, and a stop to come."""
    world = World(replace(CONFIG, **options))
    world.join("w0", 14)
    world.join("w1", 10)
    for index in range(12):
        prompt = [1] * (3 + 2 * index % 9)
        whose: dict[str, Any] = {"tenant": ("a", "b", "c")[index % 3], "priority": index % 4}
        world.submit(make_submission(f"r{index}", prompt, max_tokens=20, ignore_eos=True, **whose))
    while not world.num_preempted:
        world.turn()
        world.step("w0")
        world.step("w1")
    world.turn()
    running = [d.request_id for d in world.core.diagnostics() if d.worker]
    world.abort(running[0])
    world.stop(running[1], 19)
    world.turn()
    return world


@pytest.mark.parametrize("policy", PolicyName)
def test_a_restored_core_is_the_same_and_goes_on_the_same(policy: PolicyName) -> None:
    world = busy_world(policy=policy)
    lanes = world.core.lanes.values()
    assert any(lane.ghosts for lane in lanes)
    assert any(lane.pool.num_quarantined for lane in lanes)
    assert any(lane.in_flight for lane in lanes)
    assert len(world.core.waiting)
    data = take_snapshot(world.core)
    core = restore(data, world.config, world.records)
    core.check_integrity()
    assert take_snapshot(core) == data
    assert core.stats() == world.core.stats()
    world.core = core
    world.settle()
    world.judge_idle()


@pytest.mark.parametrize("policy", PolicyName)
def test_two_worlds_end_alike_if_one_restarts_at_every_turn(policy: PolicyName) -> None:
    digests = []
    for restarts in (False, True):
        world = busy_world(policy=policy, priority_ageing_s=0.01, tenant_weights="a=2")
        while not world.core.is_idle:
            world.turn()
            world.step("w0")
            world.step("w1")
            if restarts:
                world.save()
                world.restart()
        digests.append(world.digest)
    assert digests[0] == digests[1]


def test_stops_that_come_due_in_one_step_end_alike_after_a_restart() -> None:
    """They were told in another order than the requests came; a restored core knows only the latter, and ended them in
    it, so that a committed tick could not be derived again."""
    world = World(CONFIG)
    world.join("w", 14)
    for name in ("first", "second"):
        world.submit(make_submission(name, [1, 2, 3], max_tokens=20, ignore_eos=True))
    world.turn()
    for name in ("second", "first"):
        world.stop(name, 5)
    world.turn()
    world.save()
    while not world.ended:
        world.turn()
        world.step("w")
    assert [end.request_id for end in world.ended] == ["first", "second"]
    world.restart()


def test_prompts_are_not_in_a_snapshot() -> None:
    world = World(CONFIG)
    world.submit(make_submission("r", [7] * 90, max_tokens=5))
    world.turn()
    assert pack_int32([7, 7]) not in take_snapshot(world.core) and len(take_snapshot(world.core)) < 400
    assert read_core(save_core(world.core)).request_ids == ["r"]


def test_a_snapshot_under_another_configuration_is_refused() -> None:
    data = take_snapshot(busy_world().core)
    others = ({"block_size": 8}, {"policy": PolicyName.FAIR}, {"tenant_weights": "a=2"}, {"max_bypasses": 3})
    for changed in others:
        with pytest.raises(UnusableSnapshot, match="another configuration"):
            restore(data, replace(CONFIG, **changed), {})


def test_a_snapshot_without_its_records_is_refused() -> None:
    world = busy_world()
    with pytest.raises(UnusableSnapshot, match="no submission for request r"):
        restore(take_snapshot(world.core), CONFIG, {})


@pytest.mark.parametrize("data", [b"", b"\x90", b"\x91\x63", b"\xc1junk"])
def test_bytes_that_are_no_snapshot_are_refused(data: bytes) -> None:
    with pytest.raises(UnusableSnapshot):
        restore(data, CONFIG, {})


# ---------------------------------------------------------------- in parts


def cached_world(num_cpu_blocks: int = 0) -> World:
    """Two workers, 0 with a full cache, some of it in its host pool if there is one."""
    world = World(replace(CONFIG, max_num_seqs=2))
    world.join("w0", 24, num_cpu_blocks)
    for index in range(9):
        world.submit(make_submission(f"r{index}", [1 + index] * 17, max_tokens=3, ignore_eos=True))
        world.settle()
    world.join("w1", 24)
    world.turn()
    world.save()
    return world


def test_a_save_writes_only_the_cached_blocks_that_changed() -> None:
    world = cached_world()
    cache = world.core.lanes["w0"].pool.cache
    assert len(cache) == 24 - world.core.lanes["w0"].pool.num_free > 15
    assert save_changed_blocks(world.core) == {}
    before = {entry.block_id: entry.serial for entry in cache}
    world.submit(make_submission("new", [20] * 13, max_tokens=1, ignore_eos=True))
    world.settle()
    now = {entry.block_id: entry.serial for entry in cache}
    differing = {block for block in before | now if before.get(block) != now.get(block)}
    assert len(differing) >= 3, "nothing new was cached"
    assert num_changed_blocks(world.core) == len(differing)
    ((incarnation, parts),) = save_changed_blocks(world.core).items()
    assert incarnation == ("w0", 1) and parts.keys() == differing
    assert [place for place, part in parts.items() if part == GONE] == [block for block in parts if block not in now]


@pytest.mark.parametrize("num_cpu_blocks", [0, 40])
def test_the_parts_of_many_saves_are_the_whole(num_cpu_blocks: int) -> None:
    """Hits, releases, evictions and demotions between the saves; every restart compares the whole states."""
    world = cached_world(num_cpu_blocks)
    for index in range(30):
        prompt = [1 + index % 11] * (9 + index % 9)
        world.submit(make_submission(f"again{index}", prompt, max_tokens=1 + index % 5, ignore_eos=True))
        for _ in range(3):
            world.turn()
            world.step("w0")
            world.step("w1")
        world.save()
        world.restart()
    world.settle()
    assert world.num_hit_tokens and world.num_evicted
    assert (world.core.counters.demotions > 0) == (num_cpu_blocks > 0)


def test_the_cached_blocks_must_be_those_of_the_core() -> None:
    world = cached_world()
    saved, config, blocks = read_core(world.saved), world.config, world.saved_blocks["w0", 1]
    some = max(blocks)
    assert blocks[some] != GONE
    for damaged in (
        {},
        {**blocks, some: GONE},
        {**blocks, some: blocks[some][:-1]},
        {**blocks, some: blocks[some - 1]},
        {**blocks, 24: blocks[some]},
    ):
        with pytest.raises(UnusableSnapshot, match="cached block"):
            restore_core(saved, {("w0", 1): damaged}, config, world.records)
    restore_core(saved, {("w0", 1): blocks}, config, world.records).check_integrity()
