"""A burst of requests must not keep the event loop from everybody else, and what is refused must not wait for the work
on what came with it."""

import asyncio
from collections import deque

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.http.authentication import PUBLIC

PLACES = 16
"""About 10 ms of work. Few: so a flood has cost little when its first refusal comes, and the rest is refused then."""
HELD_S = 0.05
"""Who holds a place longer waits for something else, its client or Redis: it holds nobody else up."""
GENERATIONS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""What is queued."""


class Place:
    """Of one request, until it is queued or answered."""

    def __init__(self, turnstile: "Turnstile") -> None:
        self._turnstile: Turnstile | None = turnstile
        self._timer = asyncio.get_running_loop().call_later(HELD_S, self.leave)

    def leave(self) -> None:
        """Let the next one in. A second time does nothing."""
        if self._turnstile is not None:
            self._turnstile.leave()
            self._turnstile = None
            self._timer.cancel()


class Turnstile:
    """Lets requests in as others leave, in order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_free = PLACES

    async def enter(self) -> Place:
        """Return when it is one's turn."""
        if self._num_free:
            self._num_free -= 1
            return Place(self)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise
        return Place(self)

    def leave(self) -> None:
        """One's place goes to the first who still waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


class Admission:
    """The ASGI layer around what costs work. A request's `place` is in its state; a generation that would be refused is
    refused before it is routed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """
        Raises:
            QueueFull: the queue was full a moment ago.
        """
        if scope["type"] != "http" or scope["path"] in PUBLIC:
            await self._app(scope, receive, send)
            return
        place = scope["state"]["place"] = await self._turnstile.enter()
        try:
            if _is_new_generation(scope):
                scope["state"]["gateway"].engine.intake.check_room()
            await self._app(scope, receive, send)
        finally:
            place.leave()


def _is_new_generation(scope: Scope) -> bool:
    """One with an idempotency key may be there already."""
    is_generation = scope["method"] == "POST" and scope["path"] in GENERATIONS
    return is_generation and "idempotency-key" not in Headers(scope=scope)
