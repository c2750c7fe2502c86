"""A burst of requests must not keep the event loop from everybody else, and what is refused must not wait for the work
on what came with it."""

import asyncio
from collections import deque

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.authentication import PUBLIC

PLACES = 16
"""About 10 ms of work. Few: so a flood has cost little when its first refusal comes, and the rest is refused then."""
HELD_S = 0.05
"""Who holds a place longer waits for something else, such as Redis: it holds nobody else up."""
GENERATIONS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""What is queued."""


class Place:
    """Of one request, until it is queued or answered; it is nobody's while the rest of the body is awaited."""

    def __init__(self, turnstile: "Turnstile") -> None:
        self._turnstile = turnstile
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> None:
        """Return when it is one's turn; at once if one is inside."""
        if self._timer is None:
            await self._turnstile.enter()
            self._timer = asyncio.get_running_loop().call_later(HELD_S, self.leave)

    def leave(self) -> None:
        """Let the next one in. A second time does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._turnstile.leave()


class Turnstile:
    """Lets requests in as others leave, in order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_free = PLACES

    async def enter(self) -> None:
        """Return when it is one's turn."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

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
        place = scope["state"]["place"] = Place(self._turnstile)
        await place.enter()
        try:
            if _is_new_generation(scope):
                scope["state"]["gateway"].engine.intake.check_room()
            await self._app(scope, _in_turn(receive, place), send)
        finally:
            place.leave()


def _in_turn(receive: Receive, place: Place) -> Receive:
    """Who waits for the rest of a body holds no place, and has to wait for one when the body is whole."""
    is_whole = False

    async def receive_in_turn() -> Message:
        nonlocal is_whole
        if is_whole:
            return await receive()
        waiting = asyncio.get_running_loop().call_soon(place.leave)  # comes to nothing if the next part is here
        try:
            message = await receive()
        finally:
            waiting.cancel()
        if message["type"] == "http.request" and not message.get("more_body", False):
            is_whole = True
            await place.enter()
        return message

    return receive_in_turn


def _is_new_generation(scope: Scope) -> bool:
    """One with an idempotency key may be there already."""
    is_generation = scope["method"] == "POST" and scope["path"] in GENERATIONS
    return is_generation and "idempotency-key" not in Headers(scope=scope)
