"""Ending tasks for certain."""

import asyncio

AGAIN_S = 0.1


async def cancel_and_wait(*tasks: asyncio.Future[None]) -> None:
    """Cancel and wait until all have ended; their results are left in them.

    One request may not be enough: up to Python 3.11 `asyncio.wait_for`, which redis-py uses for every command, swallows
    a cancellation that arrives just when the command has been sent.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
