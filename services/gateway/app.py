"""The FastAPI application: routes, error shape and the gateway's life."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypedDict

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from services.gateway.access import check_callers, load_keys
from services.gateway.http import errors, operations, requests, routes
from services.gateway.http.authentication import Authentication
from services.gateway.http.context import RequestContext
from services.gateway.http.turnstile import Admission
from services.gateway.settings import Settings
from services.gateway.state import GatewayState, open_gateway
from services.gateway.text.tokenizer import TextTokenizer


class LifespanState(TypedDict):
    """What every request finds in `request.state`."""

    gateway: GatewayState


def create_app(settings: Settings, tokenizer: TextTokenizer, on_fatal: Callable[[], None] = lambda: None) -> FastAPI:
    """The application. `app.state.gateway` holds the running gateway, for the server around it.

    Raises:
        ConfigError: a key file that is none, or everybody could call.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[LifespanState]:
        async with open_gateway(settings, tokenizer, on_fatal) as gateway:
            app.state.gateway = gateway
            yield {"gateway": gateway}

    keys = load_keys(settings.api_key.get_secret_value(), settings.api_key_file)
    check_callers(keys, settings.host, insecure=settings.insecure)
    app = FastAPI(title="Pagewire", lifespan=lifespan, redirect_slashes=False)
    app.include_router(routes.router)
    app.include_router(requests.router)
    app.include_router(operations.router)
    errors.install(app)
    app.add_middleware(Admission)
    app.add_middleware(Authentication, keys=keys)
    app.add_middleware(RequestContext)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app
