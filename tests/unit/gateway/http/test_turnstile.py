"""A burst goes on a few at a time: others have their turns in between, and nobody is held up by one that waits for
something else, or that has left."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.gateway.http import turnstile as module
from services.gateway.http.turnstile import PLACES, Place, Turnstile


@pytest.fixture(autouse=True)
def _no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, nobody loses a place by time."""
    monkeypatch.setattr(module, "HELD_S", 3600.0)


def run(work: Callable[[Turnstile], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await work(Turnstile())

    asyncio.run(bounded())


async def enter(turnstile: Turnstile) -> Place:
    place = Place(turnstile)
    await place.enter()
    return place


async def fill(turnstile: Turnstile) -> list[Place]:
    return [await enter(turnstile) for _ in range(PLACES)]


def test_a_burst_goes_in_as_others_leave_and_in_order() -> None:
    async def work(turnstile: Turnstile) -> None:
        inside: list[tuple[int, Place]] = []

        async def come(number: int) -> None:
            inside.append((number, await enter(turnstile)))

        tasks = [asyncio.create_task(come(number)) for number in range(3 * PLACES)]
        for num_left in range(2 * PLACES + 1):
            for _ in range(3):
                await asyncio.sleep(0)
            assert [number for number, _ in inside] == list(range(PLACES + num_left))
            if num_left < 2 * PLACES:
                inside[num_left][1].leave()
        await asyncio.gather(*tasks)

    run(work)


def test_a_place_is_given_up_once() -> None:
    async def work(turnstile: Turnstile) -> None:
        places = await fill(turnstile)
        tasks = [asyncio.create_task(enter(turnstile)) for _ in range(2)]
        await asyncio.sleep(0)
        places[0].leave()
        places[0].leave()
        await asyncio.sleep(0.01)
        assert [task.done() for task in tasks] == [True, False]
        places[1].leave()
        await tasks[1]

    run(work)


def test_who_waits_for_something_else_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_S", 0.01)

    async def work(turnstile: Turnstile) -> None:
        for _ in range(3):
            await fill(turnstile)  # nobody leaves

    run(work)


def test_who_comes_back_waits_for_its_turn() -> None:
    async def work(turnstile: Turnstile) -> None:
        places = await fill(turnstile)
        await places[0].enter()  # it is inside
        places[0].leave()
        other = await enter(turnstile)
        back = asyncio.create_task(places[0].enter())
        await asyncio.sleep(0.01)
        assert not back.done()
        other.leave()
        await back

    run(work)


@pytest.mark.parametrize("is_called", [False, True])
def test_one_that_left_takes_no_place_of_the_living(is_called: bool) -> None:
    """Cancelled while it waits, or when its turn has come and it does not know yet."""

    async def work(turnstile: Turnstile) -> None:
        places = await fill(turnstile)
        gone = asyncio.create_task(enter(turnstile))
        alive = asyncio.create_task(enter(turnstile))
        await asyncio.sleep(0)
        if is_called:
            places[0].leave()
        gone.cancel()
        if not is_called:
            await asyncio.gather(gone, return_exceptions=True)
            places[0].leave()
        await alive
        assert gone.cancelled()

    run(work)
