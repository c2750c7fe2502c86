"""A burst of requests must not keep the event loop from everybody else, least of all from health checks."""

import asyncio
from collections import deque

PER_TURN = 16
"""About 5 ms of work."""


class Turnstile:
    """Lets a few of those who came go on per turn of the event loop, in order. Nobody holds a place while it waits for
    something else, so that slow clients hold nobody up."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False

    async def enter(self) -> None:
        """Return when it is one's turn."""
        loop = asyncio.get_running_loop()
        place = loop.create_future()
        self._waiting.append(place)
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn)
        await place

    def _turn(self) -> None:
        for _ in range(min(PER_TURN, len(self._waiting))):
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
        self._is_turning = bool(self._waiting)
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)
