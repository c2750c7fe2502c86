"""A request that kills its workers ends; those beside it do not."""

from collections.abc import Collection

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.suspects import CLEARED_TOKENS
from shared.errors import ConfigError
from shared.messages import WORKERS_DIED, FinishReason
from tests.fakes.scheduler_world import World, make_submission

POISON = "poison"


def make_world(max_worker_deaths: int = 3) -> World:
    return World(
        SchedulerConfig(
            max_model_len=200,
            block_size=4,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            max_worker_deaths=max_worker_deaths,
        )
    )


def submit(world: World, *request_ids: str, max_tokens: int = 30, beam_width: int = 0) -> None:
    for number, request_id in enumerate(request_ids):
        prompt = [number % 20 + 1] * (5 + number)
        params = {"min_tokens": max_tokens, "beam_width": beam_width}
        world.submit(make_submission(request_id, prompt, max_tokens=max_tokens, **params))  # type: ignore[arg-type]


def serve(world: World, deadly: Collection[str], *, workers: Collection[str] = ("a",), at: int = 0) -> int:
    """To the end of all requests; a worker that computes a deadly one, or its token `at`, dies of it and comes again.
    The number of deaths."""
    for name in workers:
        world.join(name, num_blocks=100)
    num_deaths = 0
    for _ in range(3000):
        world.turn()
        if not world.core.requests:
            return num_deaths
        for name in workers:
            if kills(world, name, deadly, at):
                num_deaths += 1
                assert num_deaths < 20, "no end"
                world.join(name, num_blocks=100)
                world.core.check_integrity()
                world.save()
                world.restart()
            else:
                world.step(name)
    raise AssertionError("no end")


def kills(world: World, name: str, deadly: Collection[str], at: int) -> bool:
    worker = world.workers[name]
    if not worker.inbox:
        return False
    added = {new.request_id for new in worker.inbox[0].added}
    here = added | {row.request_id for row in worker.rows.values()}
    return any(request_id in here and len(world.readers[request_id].tokens) >= at for request_id in deadly)


def reasons(world: World) -> dict[str, FinishReason]:
    return {ended.request_id: ended.final.reason for ended in world.ended}


@pytest.mark.parametrize("limit", [2, 3, 5])
@pytest.mark.parametrize("workers", [("a",), ("a", "b")])
def test_who_kills_its_workers_ends_and_its_neighbours_go_on(limit: int, workers: tuple[str, ...]) -> None:
    world = make_world(max_worker_deaths=limit)
    names = ["r0", "r1", POISON, "r2", "r3"]
    submit(world, *names)
    assert serve(world, [POISON], workers=workers) == limit
    ends = reasons(world)
    assert ends.pop(POISON) is FinishReason.ERROR
    assert ends == dict.fromkeys(["r0", "r1", "r2", "r3"], FinishReason.LENGTH)
    (poison,) = [ended for ended in world.ended if ended.request_id == POISON]
    assert poison.final.message == WORKERS_DIED and poison.usage(1.0).reason is FinishReason.ERROR


def test_it_may_yield_a_token_at_each_prefill() -> None:
    """It is decode that kills: every time it has got a little further."""
    world = make_world()
    submit(world, "r0", POISON)
    world.join("a", num_blocks=100)
    world.turn()
    num_deaths, tokens = 0, 0
    while world.core.requests:
        world.turn()
        reader = world.readers[POISON]
        if POISON in world.core.requests and len(reader.tokens) > tokens:
            num_deaths, tokens = num_deaths + 1, len(reader.tokens)
            world.join("a", num_blocks=100)
        else:
            world.step("a")
    assert num_deaths == 3 and reasons(world) == {POISON: FinishReason.ERROR, "r0": FinishReason.LENGTH}


def test_two_of_them_are_found_one_after_the_other() -> None:
    world = make_world()
    submit(world, "r0", "p1", "r1", "p2", "r2")
    assert serve(world, ["p1", "p2"]) == 4
    assert {name for name, reason in reasons(world).items() if reason is FinishReason.ERROR} == {"p1", "p2"}


def test_workers_that_die_for_other_reasons_end_nobody() -> None:
    """Again and again, each time after every request got on a little."""
    world = make_world()
    submit(world, "r0", "r1", "r2", max_tokens=100)
    submit(world, "b", max_tokens=60, beam_width=2)
    world.join("a", num_blocks=200)
    world.turn()
    num_deaths = 0
    while world.core.requests:
        for _ in range(CLEARED_TOKENS + 10):
            world.turn()
            world.step("a")
        if num_deaths < 9:
            num_deaths += 1
            world.join("a", num_blocks=200)
    assert num_deaths == 9 and FinishReason.ERROR not in reasons(world).values()


def test_an_idle_worker_that_dies_is_nobodys_fault() -> None:
    world = make_world(max_worker_deaths=1)
    submit(world, "r0")
    for _ in range(3):
        world.join("a", num_blocks=100)
    world.settle()
    assert reasons(world) == {"r0": FinishReason.LENGTH}


def test_without_a_limit_it_is_tried_for_ever() -> None:
    world = make_world(max_worker_deaths=0)
    submit(world, POISON)
    with pytest.raises(AssertionError, match="no end"):
        serve(world, [POISON])
    with pytest.raises(ConfigError, match="max_worker_deaths"):
        make_world(max_worker_deaths=-1)


def test_who_gets_a_few_tokens_on_every_worker_is_not_blamed_for_their_deaths() -> None:
    """Workers die for other reasons, again and again, and each soon after it began."""
    world = make_world(max_worker_deaths=3)
    submit(world, "r", max_tokens=30)
    world.join("a", num_blocks=100)
    begun_at = num_deaths = 0
    for _ in range(500):
        world.turn()
        if not world.core.requests:
            break
        world.step("a")
        if len(world.readers["r"].tokens) >= begun_at + 5 and world.workers["a"].inbox:
            begun_at, num_deaths = len(world.readers["r"].tokens), num_deaths + 1
            world.join("a", num_blocks=100)
    assert reasons(world) == {"r": FinishReason.LENGTH} and num_deaths > 3
