"""The outermost ASGI layer: a request id for every answer, and a shape for what nobody caught."""

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.errors import code_of, log_failure, to_response
from services.gateway.http.identities import Identities

DRAWN = "req-"
"""Before the id of what is no generation."""


class RequestContext:
    """Puts `request_id` into the request's state and into the header `X-Request-Id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._identities = Identities()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = DRAWN + self._identities.next()
        started, may_be_sent = False, "expect" not in Headers(scope=scope)

        async def receive_body() -> Message:
            nonlocal may_be_sent
            may_be_sent = True
            return await receive()

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                own = [(b"x-request-id", state["request_id"].encode())]
                if not may_be_sent:  # the client may send its body all the same, which is no next request
                    own.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            await self._app(scope, receive_body, send_with_id)
        except ClientDisconnect:
            return
        except Exception as error:
            if started:
                log_failure(error, state["request_id"])  # returning unfinished makes the server cut the connection
            else:
                response = to_response(error, state["request_id"])
                state["gateway"].engine.metrics.failed(code_of(response))
                await response(scope, receive, send_with_id)
