"""A request that goes on at a worker with other numerics: counted, flagged, kept over a restart of the scheduler."""

from services.scheduler.core.config import SchedulerConfig
from tests.fakes.scheduler_world import World, make_submission


def make_world() -> World:
    return World(SchedulerConfig(max_model_len=100, block_size=4))


def submit(world: World, name: str, max_tokens: int = 20) -> None:
    world.submit(make_submission(name, [1, 2, 3, 4, 5], max_tokens=max_tokens, ignore_eos=True))


def run(world: World, turns: int) -> None:
    for _ in range(turns):
        world.turn()
        for name in list(world.workers):
            world.step(name)


def flags(world: World) -> dict[str, int]:
    """Request → switches, as its usage record says; its final record says the same."""
    for finished in world.ended:
        assert finished.usage(0.0).num_numerics_switches == finished.final.num_numerics_switches
    return {finished.request_id: finished.final.num_numerics_switches for finished in world.ended}


def test_a_switch_between_unequal_workers_is_counted_and_flagged() -> None:
    world = make_world()
    world.join("one", 40, fingerprint="float32")
    submit(world, "moved")
    run(world, 5)
    submit(world, "fresh")  # arrives, and has no token yet when its worker goes
    world.join("one", 40, fingerprint="bfloat16")
    world.settle()
    assert flags(world) == {"moved": 1, "fresh": 0}
    assert world.core.stats().num_numerics_switches == 1


def test_going_on_at_an_equal_worker_is_no_switch() -> None:
    world = make_world()
    world.join("one", 40, fingerprint="float32")
    submit(world, "moved")
    run(world, 5)
    world.join("one", 40, fingerprint="float32")
    world.settle()
    assert flags(world) == {"moved": 0} and world.core.counters.requeues == 1


def test_back_and_forth_are_two_switches_and_a_restart_forgets_none() -> None:
    world = make_world()
    world.join("one", 40, fingerprint="float32")
    submit(world, "moved")
    run(world, 5)
    world.join("one", 40, fingerprint="bfloat16")
    run(world, 5)
    world.save()
    world.restart()
    world.join("one", 40, fingerprint="float32")
    world.settle()
    assert flags(world) == {"moved": 2}


def test_a_worker_that_does_not_tell_its_numerics_is_not_suspected() -> None:
    world = make_world()
    world.join("one", 40, fingerprint="float32")
    submit(world, "moved")
    run(world, 5)
    world.join("one", 40)
    run(world, 5)
    world.join("one", 40, fingerprint="float32")
    world.settle()
    assert flags(world) == {"moved": 0}
