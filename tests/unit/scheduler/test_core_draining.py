"""A worker that leaves: its requests go on elsewhere with their tokens, or end where they are (cases 98, 99)."""

from typing import Any

from services.scheduler.core.config import SchedulerConfig
from shared.messages import EventKind
from tests.fakes.scheduler_world import World, make_submission


def make_world(**config: Any) -> World:
    return World(SchedulerConfig(**{"max_model_len": 100, "block_size": 4, **config}))


def submit(world: World, name: str, size: int = 6, max_tokens: int = 20) -> None:
    prompt = [ord(name[-1]) % 20 + 1, *range(1, size)]
    world.submit(make_submission(name, prompt, max_tokens=max_tokens, ignore_eos=True))


def places(world: World) -> dict[str, str]:
    return {d.request_id: d.worker for d in world.core.diagnostics()}


def run(world: World, turns: int = 1) -> None:
    for _ in range(turns):
        world.turn()
        for name in list(world.workers):
            world.step(name)


def handed_over(world: World) -> dict[str, int]:
    """Request → tokens that it took along."""
    events = [e for e in world.events if e.kind is EventKind.PREEMPTED and e.reason == "drain"]
    return {event.request_id: event.num_output_tokens for event in events}


def test_running_requests_go_on_at_another_worker_with_their_tokens() -> None:
    world = make_world()
    world.join("old", 40)
    for name in ("ra", "rb", "rc"):
        submit(world, name)
    run(world, 6)
    world.join("new", 40)
    world.drain("old")
    run(world, 5)
    assert set(places(world).values()) == {"new"}
    moved = handed_over(world)
    assert len(moved) == 3 and min(moved.values()) >= 4, "nothing is computed twice"
    assert "old" not in world.workers and world.num_drained == 1, "it may go long before they end"
    world.settle()
    world.judge_idle()
    assert (world.core.stats().num_handovers, world.num_preempted) == (3, 0)


def test_without_another_worker_they_run_to_their_end_where_they_are() -> None:
    world = make_world()
    world.join("old", 40)
    submit(world, "ra")
    run(world, 3)
    world.drain("old")
    submit(world, "rb")
    run(world, 3)
    assert places(world) == {"ra": "old", "rb": ""}
    world.settle()
    assert world.readers["ra"].terminal is not None and not handed_over(world)
    assert world.num_drained == 1
    world.join("new", 40)
    world.settle()
    world.judge_idle()


def test_those_without_room_elsewhere_run_on_until_there_is_some() -> None:
    """Two rows are free at the other worker: two requests move at once, the third when one of them has ended."""
    world = make_world(max_num_seqs=3)
    world.join("old", 40)
    for name, length in (("ra", 8), ("rb", 30), ("rc", 60)):
        submit(world, name, max_tokens=length)
    run(world, 2)
    world.join("new", 60)
    run(world)
    submit(world, "rd", max_tokens=60)
    run(world, 2)
    assert places(world)["rd"] == "new"
    world.drain("old")
    run(world, 3)
    assert places(world) == {"ra": "new", "rb": "new", "rc": "old", "rd": "new"}
    before = len(world.readers["rc"].tokens)
    run(world, 6)
    assert len(world.readers["rc"].tokens) > before, "no pause while it waits for room"
    world.settle()
    world.judge_idle()
    assert list(handed_over(world)) == ["ra", "rb", "rc"]


def test_newcomers_do_not_take_the_room_of_those_that_leave() -> None:
    world = make_world(max_num_seqs=2, plan_ahead=1)
    world.join("old", 40)
    submit(world, "ra", max_tokens=40)
    submit(world, "rb", max_tokens=40)
    run(world, 3)
    world.join("new", 40)
    run(world)
    world.turn()  # the old one has a plan in flight
    world.drain("old")
    submit(world, "rc")
    submit(world, "rd")
    run(world, 3)
    assert places(world) == {"ra": "new", "rb": "new", "rc": "", "rd": ""}
    world.settle()
    world.judge_idle()


def test_a_request_that_only_fits_the_leaving_worker_stays_there() -> None:
    world = make_world()
    world.join("old", 40)
    submit(world, "rbig", size=40, max_tokens=30)
    submit(world, "rsmall", max_tokens=30)
    run(world, 4)
    world.join("small", 10)
    world.drain("old")
    world.settle()
    world.judge_idle()
    assert world.readers["rbig"].terminal is not None and len(world.readers["rbig"].tokens) == 30
    assert "rbig" not in handed_over(world)


def test_a_worker_that_joined_in_vain_leaves_at_once() -> None:
    world = make_world()
    world.join("old", 40)
    world.turn()
    world.drain("old")
    world.turn()
    assert world.num_drained == 1 and not world.workers


def test_what_is_preempted_on_the_last_worker_comes_back_to_it() -> None:
    """It cannot wait for another worker: there may never be one, and this one goes only when nothing is left."""
    world = make_world()
    world.join("old", 12)
    submit(world, "ra", max_tokens=30)
    submit(world, "rb", max_tokens=30)
    run(world, 3)
    world.drain("old")
    submit(world, "rnew")
    run(world, 2)
    assert {d.request_id: d.reason for d in world.core.diagnostics()} == {"ra": "", "rb": "", "rnew": "no_worker"}
    world.settle()
    assert world.num_preempted > 0 and world.num_drained == 1
    assert [name for name, reader in world.readers.items() if reader.terminal is None] == ["rnew"]
