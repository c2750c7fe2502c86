"""Placement by what is really cached, weighed against load (cases 96, 97)."""

import random

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.placement import ROW_WEIGHT
from shared.messages import Submission
from tests.fakes.scheduler_world import World, make_submission
from tests.fakes.timed_fleet import TimedFleet

VOCABULARY = range(1, 30_000)


def arrivals(count: int, *, rate: float, share: float, seed: int = 3) -> list[tuple[float, Submission]]:
    """`count` requests at `rate` a second; a `share` of them begins with the same 2,000 tokens."""
    rng = random.Random(seed)
    popular = rng.choices(VOCABULARY, k=2000)
    now, found = 0.0, []
    for index in range(count):
        now += rng.expovariate(rate)
        prompt = popular if rng.random() < share else rng.choices(VOCABULARY, k=2000)
        prompt = prompt + rng.choices(VOCABULARY, k=40)
        found.append((now, make_submission(f"r{index}", prompt, max_tokens=rng.randint(30, 90))))
    return found


@pytest.mark.parametrize(("rate", "share"), [(10, 0.9), (40, 0.9), (40, 1.0), (120, 1.0)])
def test_a_popular_prefix_is_hit_and_makes_no_hot_spot(rate: float, share: float) -> None:
    """Case 96. One worker alone computes about 35 such requests a second, 5 without hits."""
    config = SchedulerConfig(max_model_len=4096, max_num_seqs=64)
    pool = TimedFleet(config, num_workers=3, num_blocks=2000)
    pool.run(arrivals(500, rate=rate, share=share))
    assert pool.imbalance() <= 1.5
    assert pool.hit_rate > 0.6
    computed = [worker.num_computed for worker in pool.workers.values()]
    assert max(computed) * 3 / sum(computed) <= 1.5


def make_world(num_blocks: int = 60) -> World:
    world = World(SchedulerConfig(max_model_len=200, block_size=4, max_num_seqs=40))
    world.join("w0", num_blocks)
    world.join("w1", num_blocks)
    world.turn()
    return world


def workers_of(world: World) -> dict[str, str]:
    return {d.request_id: d.worker for d in world.core.diagnostics()}


def submit(world: World, name: str, prompt: list[int], max_tokens: int = 40) -> None:
    world.submit(make_submission(name, prompt, max_tokens=max_tokens, ignore_eos=True))


def test_a_request_goes_where_its_prefix_is() -> None:
    world = make_world()
    submit(world, "first", [1] * 81, max_tokens=1)
    world.settle()
    submit(world, "w0's load", [2] * 8, max_tokens=60)
    world.turn()
    assert workers_of(world) == {"w0's load": "w0"}
    submit(world, "again", [1] * 80 + [3])
    submit(world, "other", [4] * 80 + [3])
    world.step("w0")
    world.turn()
    assert workers_of(world) == {"w0's load": "w0", "again": "w0", "other": "w1"}
    assert world.cached == {"again": 80}


def test_load_outweighs_a_prefix() -> None:
    """20 cached blocks of 4 tokens are worth less than two rows."""
    assert 2 * ROW_WEIGHT > 80
    world = make_world()
    submit(world, "first", [1] * 81, max_tokens=1)
    world.settle()
    for name in ("a", "b"):
        submit(world, name, [1] * 80 + [2, 3])
    submit(world, "c", [1] * 80 + [2, 3])
    world.turn()
    assert workers_of(world) == {"a": "w0", "b": "w0", "c": "w1"}


def test_evicted_blocks_draw_nobody() -> None:
    """Case 97: what counts is what lies in the lane's cache when the request is placed, not what was sent there."""
    world = make_world(num_blocks=40)
    submit(world, "first", [1] * 81, max_tokens=1)
    world.settle()
    for token in (5, 6):
        submit(world, f"flood{token}", [token] * 120, max_tokens=1)
        world.settle()
    assert world.num_evicted >= 20 and not world.cached
    submit(world, "w0's load", [2] * 8, max_tokens=60)
    world.turn()
    submit(world, "probe", [1] * 80 + [3])
    world.turn()
    assert workers_of(world) == {"w0's load": "w0", "probe": "w1"}
    assert not world.cached
