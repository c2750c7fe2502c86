"""Nothing is answered without a key, but what is listed here; checked before any route is looked up.

The path that is compared is the one by which Starlette routes: never one that is put together with the `Host` header.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.access import Caller, KeyRing
from services.gateway.http.errors import error_response

PUBLIC = frozenset({"/health/live", "/health/ready"})
"""For supervisors and load balancers."""
MAX_KEY = 512
ANYBODY = Caller()


class Authentication:
    """Puts the `caller` into the request's state, or answers 401. Without any key everybody may call."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        caller = self._caller(scope)
        if caller is None:
            scope["state"]["gateway"].engine.metrics.failed("invalid_api_key")
            headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
            answer = error_response(401, "a valid API key is needed", code="invalid_api_key", headers=headers)
            await answer(scope, receive, send)
            return
        scope["state"]["caller"] = caller
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller | None:
        if not len(self._keys) or scope["path"] in PUBLIC:
            return ANYBODY
        values = Headers(scope=scope).getlist("authorization")
        if len(values) != 1:
            return None
        kind, _, key = values[0].strip().partition(" ")
        key = key.strip()
        return self._keys.find(key) if kind.lower() == "bearer" and 0 < len(key) <= MAX_KEY else None
