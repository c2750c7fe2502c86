"""A burst goes on a few at a time: others have their turns in between, and nobody who left is waited for."""

import asyncio

from services.gateway.http.turnstile import PER_TURN, Turnstile


def test_others_get_their_turns_during_a_burst() -> None:
    async def run() -> tuple[list[int], int]:
        turnstile, passed, turns = Turnstile(), [], 0

        async def come(number: int) -> None:
            await turnstile.enter()
            passed.append(number)

        tasks = [asyncio.create_task(come(number)) for number in range(10 * PER_TURN)]
        before = 0
        while len(passed) < len(tasks):
            await asyncio.sleep(0)
            assert len(passed) - before <= PER_TURN
            before, turns = len(passed), turns + 1
        return passed, turns

    passed, turns = asyncio.run(run())
    assert passed == sorted(passed) and turns >= 10


def test_one_that_left_takes_no_place_of_the_living() -> None:
    async def run() -> None:
        turnstile = Turnstile()
        gone = asyncio.create_task(turnstile.enter())
        await asyncio.sleep(0)
        gone.cancel()
        async with asyncio.timeout(1):
            await turnstile.enter()
            await turnstile.enter()

    asyncio.run(run())
