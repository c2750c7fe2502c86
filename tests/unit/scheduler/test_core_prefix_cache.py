"""Cached blocks: who hits what, what goes first, and that a hash alone decides nothing."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.scheduler.core import prefix_cache
from services.scheduler.core.blocks import BlockPool, Reclaim
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.evictable import Eviction
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.prefix_cache import block_key, domain, root_key
from services.scheduler.core.request import Request
from services.scheduler.core.residency import domain_of
from services.scheduler.core.snapshot import restore, take_snapshot
from shared.packing import pack_int32
from tests.fakes.content_worker import reference_output
from tests.fakes.scheduler_world import World, make_submission


def make_world(num_blocks: int = 64, **config: Any) -> World:
    world = World(SchedulerConfig(**{"max_model_len": 200, "block_size": 4, "max_num_batched_tokens": 64, **config}))
    world.join("w", num_blocks)
    return world


def serve(world: World, name: str, prompt: Sequence[int], max_tokens: int = 3, **options: Any) -> int:
    """One request to its end; how many of its prompt tokens were cached, as readers were told."""
    world.submit(make_submission(name, prompt, max_tokens=max_tokens, ignore_eos=True, **options))
    world.settle()
    return world.cached.get(name, 0)


# ---------------------------------------------------------------- keys


def test_keys_have_128_bits_and_depend_on_everything_before() -> None:
    root = root_key(domain(tenant="t"))
    keys = {
        block_key(root, b"abcd"),
        block_key(root, b"abce"),
        block_key(block_key(root, b"abcd"), b"abcd"),
        block_key(root_key(domain(tenant="u")), b"abcd"),
    }
    assert len(keys) == 4
    assert {len(key) for key in keys} == {16}


def test_no_two_domains_are_the_same_bytes() -> None:
    names = ["", "a", "ab", "b", "ta", "\x01", "a\x00", "t\x01\x00\x00\x00a"]
    domains = {
        domain(tenant=tenant, cache_salt=salt, adapter=adapter)
        for tenant in names
        for salt in names
        for adapter in names
    }
    assert len(domains) == len(names) ** 3


# ---------------------------------------------------------------- hits


@pytest.mark.parametrize(("size", "cached"), [(15, 12), (16, 12), (17, 16), (1, 0), (4, 0), (5, 4)])
def test_the_same_prompt_twice_leaves_one_token_to_compute(size: int, cached: int) -> None:
    """BEST-23: also when the prompt fills its blocks exactly."""
    world = make_world()
    prompt = list(range(1, size + 1))
    assert serve(world, "first", prompt) == 0
    assert serve(world, "second", prompt) == cached <= size - 1
    assert world.readers["first"].tokens == world.readers["second"].tokens
    world.judge_idle()


def test_only_the_own_domain_counts() -> None:
    """Case 72: neither another tenant nor another salt hits, or is told of, the blocks."""
    world = make_world()
    prompt = list(range(1, 18))
    assert serve(world, "a", prompt, tenant="alice") == 0
    assert serve(world, "b", prompt, tenant="bob") == 0
    assert serve(world, "c", prompt, tenant="alice", cache_salt="salt") == 0
    assert serve(world, "d", prompt, tenant="alic", cache_salt="e") == 0
    assert serve(world, "e", prompt, tenant="alice") == 16
    assert serve(world, "f", prompt, tenant="alice", cache_salt="salt") == 16
    assert world.core.stats().prefix_cache_hits == 32


def test_other_weights_are_never_hit() -> None:
    """Case 69: no request has an adapter, and its domain says so; a worker that came anew may have loaded anything."""
    submission = make_submission("r", [1], max_tokens=1, tenant="t", cache_salt="s")
    assert domain_of(Request(submission, arrival=0)) == domain(tenant="t", cache_salt="s", adapter="")
    assert domain_of(Request(submission, arrival=0)) != domain(tenant="t", cache_salt="s", adapter="a")
    world = make_world()
    prompt = list(range(1, 18))
    assert (serve(world, "first", prompt), serve(world, "second", prompt)) == (0, 16)
    world.join("w", 40)
    assert (serve(world, "third", prompt), serve(world, "fourth", prompt)) == (0, 16)


def test_an_aborted_request_leaves_its_blocks() -> None:
    """BEST-09: a long prompt, given up while it decodes, and sent again with a suffix."""
    world = make_world(300, max_model_len=1200, block_size=16, max_num_batched_tokens=256)
    prompt = [1 + position % 90 for position in range(1000)]
    world.submit(make_submission("left", prompt, max_tokens=100, ignore_eos=True))
    while len(world.readers["left"].tokens) < 30:
        world.turn()
        world.step("w")
    world.abort("left")
    world.settle()
    assert serve(world, "again", [*prompt, 7, 8, 9]) == 1000 // 16 * 16
    world.judge_idle()


def test_a_conversation_hits_prompt_and_answer() -> None:
    world = make_world()
    prompt = list(range(1, 11))
    serve(world, "question", prompt, max_tokens=20)
    answer = world.readers["question"].tokens
    # The KV of the last token was never written: 29 tokens are in the cache, 28 of them in full blocks.
    assert serve(world, "further", [*prompt, *answer, 5, 6]) == 28


def test_what_a_running_request_wrote_is_shared_while_it_runs() -> None:
    world = make_world(40)
    prompt = list(range(1, 18))
    world.submit(make_submission("runs", prompt, max_tokens=60, ignore_eos=True))
    for _ in range(4):
        world.turn()
        world.step("w")
    used = world.core.lanes["w"].pool.num_available
    world.submit(make_submission("joins", prompt, max_tokens=60, ignore_eos=True))
    world.turn()
    pool = world.core.lanes["w"].pool
    assert world.cached == {"joins": 16}
    assert used - pool.num_available <= 2, "the four shared blocks cost nothing"
    assert sorted(pool.references(block) for block in range(40))[-4:] == [2, 2, 2, 2]
    world.settle()
    world.judge_idle()


def test_blocks_of_a_plan_in_flight_are_not_hit() -> None:
    world = make_world(plan_ahead=2)
    prompt = list(range(1, 18))
    world.submit(make_submission("writes", prompt, max_tokens=30, ignore_eos=True))
    world.tick()
    world.submit(make_submission("early", prompt, max_tokens=3, ignore_eos=True))
    world.turn()
    assert world.admissions == ["writes", "early"]
    assert not world.cached
    world.step("w")
    world.turn()
    world.submit(make_submission("later", prompt, max_tokens=3, ignore_eos=True))
    world.settle()
    assert world.cached == {"later": 16}


def test_long_answers_are_cached_while_they_grow() -> None:
    """Rows have their turn: without it a row would wait for its end."""
    world = make_world(200, max_model_len=700, max_num_seqs=4)
    world.submit(make_submission("long", [1, 2, 3], max_tokens=600, ignore_eos=True))
    while len(world.readers["long"].tokens) < 300:
        world.turn()
        world.step("w")
    assert len(world.core.lanes["w"].pool.cache) > 40


def test_a_preempted_request_resumes_on_its_own_blocks() -> None:
    """Its last blocks go to those that needed them; what is left of the front is not computed again."""
    world = make_world(12, plan_ahead=1, admission_room=0)
    world.submit(make_submission("old", [1] * 16, max_tokens=24, ignore_eos=True))
    world.submit(make_submission("new", [2] * 16, max_tokens=24, ignore_eos=True))
    world.settle()
    world.judge_idle()
    assert world.num_preempted >= 1
    assert world.num_hit_tokens >= 8
    assert not world.cached, "readers are told of the first admission only"


def test_a_request_in_error_takes_its_blocks_out_of_the_cache() -> None:
    world = make_world()
    prompt = list(range(1, 18))
    world.submit(make_submission("bad", prompt, max_tokens=30, ignore_eos=True))
    for _ in range(5):
        world.turn()
        world.step("w")
    assert len(world.core.lanes["w"].pool.cache) > 0
    world.fail("bad")
    world.settle()
    assert serve(world, "next", prompt) == 0
    world.judge_idle()


def test_without_caching_nothing_is_hit_and_every_block_is_free() -> None:
    world = make_world(enable_prefix_caching=False)
    prompt = list(range(1, 18))
    assert [serve(world, name, prompt) for name in "abc"] == [0, 0, 0]
    stats = world.core.stats()
    assert (stats.num_free_blocks, stats.prefix_cache_hits) == (64, 0)


def test_immediate_reclaim_shares_only_among_those_that_run() -> None:
    world = make_world(reclaim=Reclaim.IMMEDIATE)
    prompt = list(range(1, 18))
    assert [serve(world, name, prompt) for name in "ab"] == [0, 0]
    assert world.core.stats().num_free_blocks == 64
    world.submit(make_submission("runs", prompt, max_tokens=60, ignore_eos=True))
    world.turn()
    world.step("w")
    assert serve(world, "joins", prompt) == 16
    world.judge_idle()


# ---------------------------------------------------------------- a hash alone decides nothing


@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_collisions_never_give_another_prompts_blocks(monkeypatch: pytest.MonkeyPatch, num_bits: int) -> None:
    """BEST-22, CVE-2025-25183: 500 prompts that share beginnings, under a hash of a few bits."""

    contents: dict[bytes, set[bytes]] = {}

    def weak(before: bytes, tokens: bytes) -> bytes:
        key = bytes([block_key(before, tokens)[0] & (2**num_bits - 1)]) * 16
        contents.setdefault(key, set()).add(tokens)
        return key

    monkeypatch.setattr(prefix_cache, "block_key", weak)
    world = make_world(120, block_size=2, max_num_seqs=8)
    for index in range(500):
        prompt = [1 + index % 3, 1 + index % 2, 2, 2, *(1 + (index // 7 + 3 * p) % 20 for p in range(index % 9)), 1]
        tenant = ("", "other")[index % 5 == 0]
        world.submit(make_submission(f"r{index}", prompt, max_tokens=1 + index % 9, ignore_eos=True, tenant=tenant))
        if index % 3 == 0:
            world.turn()
            world.step("w")
    world.settle()
    assert world.num_hit_tokens > 0
    assert max(map(len, contents.values())) > 1, "nothing collided"
    for request_id, submission in world.records.items():
        assert world.readers[request_id].tokens == reference_output(submission)[0]


def test_a_block_behind_another_beginning_is_no_hit() -> None:
    """The beginning is replaced by another one under the same key; the same tokens behind it are other KV."""
    pool = BlockPool(4)
    pool.allocate(3)
    keys = [b"1" * 16, b"2" * 16]
    pool.keep([0, 1], keys, b"domain", [b"aaaa", b"same"])
    pool.keep([2], keys[:1], b"domain", [b"bbbb"])
    assert [entry.block_id for entry in pool.cache.match(keys, b"domain", [b"bbbb", b"same"])] == [2]
    assert pool.cache.match(keys, b"domain", [b"aaaa", b"same"]) == []
    assert pool.cache.match(keys, b"other", [b"bbbb", b"same"]) == []
    pool.release([0, 1, 2])
    assert (pool.num_free, pool.num_cached) == (2, 2)


def test_a_chunk_of_a_row_that_failed_says_nothing_of_who_has_the_row_now() -> None:
    world = make_world(plan_ahead=2, max_num_batched_tokens=8)
    world.submit(make_submission("fails", [1] * 40, max_tokens=3, ignore_eos=True))
    world.turn()
    world.fail("fails")
    world.step("w")
    world.submit(make_submission("next", [2] * 40, max_tokens=3, ignore_eos=True))
    world.turn()
    assert world.core.requests["next"].seat is not None
    world.step("w")
    world.turn()
    assert len(world.core.lanes["w"].pool.cache) == 0
    world.settle()
    world.judge_idle()


# ---------------------------------------------------------------- eviction


def cached_pool(eviction: Eviction) -> BlockPool:
    """Blocks 0, 1 and 2, cached under their own number, each of a table of its own."""
    pool = BlockPool(3, eviction=eviction)
    for number in range(3):
        pool.allocate(1)
        pool.keep([number], [bytes([number]) * 16], b"domain", [pack_int32([number])])
    for number in range(3):
        pool.release([number])
    return pool


def use(pool: BlockPool, number: int) -> None:
    entry = pool.cache.at(number)
    assert entry is not None
    pool.release(pool.hit([entry]))


@pytest.mark.parametrize(
    ("eviction", "order"),
    [(Eviction.LRU, [2, 0, 1]), (Eviction.LFU, [2, 1, 0]), (Eviction.FIFO, [0, 1, 2])],
)
def test_what_goes_first(eviction: Eviction, order: list[int]) -> None:
    pool = cached_pool(eviction)
    for number in (0, 0, 1):  # 2 is never hit, 0 twice, 1 last
        use(pool, number)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (0, 3, 3)
    assert [pool.allocate(1)[0] for _ in range(3)] == order
    assert (pool.num_evictions, len(pool.cache)) == (3, 0)


def test_a_table_gives_up_its_deepest_block_first() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    pool.keep([0, 1, 2], [bytes([n]) * 16 for n in range(3)], b"domain", [pack_int32([n]) for n in range(3)])
    pool.release([0, 1, 2])
    assert [pool.allocate(1) for _ in range(3)] == [[2], [1], [0]]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.keep([0], [b"k" * 16], b"domain", [b"abcd"])
    pool.release([0, 1])
    assert (pool.num_free, pool.num_cached) == (3, 1)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.cache.at(0) is not None
    assert pool.allocate(1) == [0]


def test_the_same_content_computed_twice_is_kept_once() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    (first, second) = (pool.keep([block], [b"k" * 16], b"domain", [b"abcd"]) for block in (0, 1))
    assert first == second
    pool.release([1])
    assert (pool.num_free, pool.num_cached) == (3, 0)
    pool.release([0])
    assert (pool.num_free, pool.num_cached) == (3, 1)


def test_a_table_takes_the_entry_of_an_idle_block_over() -> None:
    """Else the idle one may be evicted, and what this table writes behind it could not be found."""
    pool = BlockPool(4)
    pool.allocate(2)
    serial = pool.keep([0], [b"k" * 16], b"domain", [b"abcd"])
    pool.release([0])
    assert pool.keep([1], [b"k" * 16], b"domain", [b"abcd"]) == serial
    entry = pool.cache.at(1)
    assert entry is not None and entry.serial == serial
    assert (pool.num_free, pool.num_cached) == (3, 0)


# ---------------------------------------------------------------- progress, snapshot


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("caching", [True, False])
def test_four_times_the_pool_finishes(caching: bool, policy: PolicyName, preemption: Preemption) -> None:
    """BEST-25 and case 75: everybody ends, though blocks run out all the time, and nobody is preempted again and
    again. Short prompts and long answers: without room kept free, many enter and few can stay."""
    options: dict[str, Any] = {"policy": policy, "preemption": preemption, "priority_ageing_s": 0.01}
    config = SchedulerConfig(
        max_model_len=200,
        block_size=4,
        max_num_seqs=16,
        admission_room=0,
        enable_prefix_caching=caching,
        **options,
    )
    world = World(config)
    world.join("w", 24, 48)
    for index in range(16):
        prompt = [1, 2, 3, 4, 1 + index]
        whose: dict[str, Any] = {"tenant": "ab"[index > 12] if policy == "fair" else "", "priority": index % 3}
        world.submit(make_submission(f"r{index}", prompt, max_tokens=19, ignore_eos=True, **whose))
    world.settle()
    world.judge_idle()
    times = [sum(e.request_id == f"r{index}" and e.kind == "preempted" for e in world.events) for index in range(16)]
    assert sum(times) >= 8, "hardly anybody had to give up blocks"
    assert max(times) <= 3
    assert (world.num_swapped > 0) == (preemption is Preemption.SWAP)
    assert (world.num_hit_tokens > 0) == caching


@pytest.mark.parametrize("eviction", Eviction)
def test_a_restored_cache_hits_and_evicts_alike(eviction: Eviction) -> None:
    config: dict[str, Any] = {"eviction": eviction, "max_num_seqs": 3}
    digests = []
    for restarts in (False, True):
        world = make_world(20, **config)
        for index in range(40):
            prompt = [1 + index % 4] * (5 + index % 11)
            world.submit(make_submission(f"r{index}", prompt, max_tokens=2 + index % 13, ignore_eos=True))
            world.turn()
            world.step("w")
            if restarts and index % 3 == 0:
                world.save()
                world.restart()
        world.settle()
        assert world.num_hit_tokens and world.num_evicted
        digests.append(world.digest)
    assert digests[0] == digests[1]


def test_a_full_cache_is_restored_exactly() -> None:
    world = make_world(40)
    for index in range(12):
        serve(world, f"r{index}", [1 + index % 5] * 14, tenant=f"t{index % 2}")
    data = take_snapshot(world.core)
    core = restore(data, world.config, world.records)
    core.check_integrity()
    assert take_snapshot(core) == data
    assert len(core.lanes["w"].pool.cache) > 10


def test_a_request_that_finds_its_hits_evicted_leaves_no_empty_chunk_to_the_next() -> None:
    """Three requests are placed in one plan by what is cached. The blocks of the first evict what the second would hit,
    so that the second computes more than was reckoned and uses up the budget: the third must wait for the next plan. It
    was admitted with a chunk of no tokens, which no worker can carry out."""
    world = World(SchedulerConfig(max_model_len=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=16))
    world.join("w", 16)
    prefix = [5, 6, 7, 8, 9, 10, 11, 12]
    world.submit(make_submission("first", [*prefix, 1], max_tokens=1))
    world.settle()
    world.submit(make_submission("filler", [3] * 51, max_tokens=1))
    world.settle()
    for name, prompt in (("a", [13] * 13), ("b", [*prefix, 2]), ("c", [14] * 5)):
        world.submit(make_submission(name, prompt, max_tokens=1))
    world.turn()
    plan = world.workers["w"].inbox[0]
    assert [new.request_id for new in plan.added] == ["a", "b"]
    assert plan.added[1].num_computed_tokens == 0, "its hits were not evicted"
    assert plan.chunks == ((plan.added[0].row, 13), (plan.added[1].row, 3))
    world.settle()
