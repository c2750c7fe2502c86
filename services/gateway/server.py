"""The HTTP server around the application, and how it ends."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from services.gateway.app import create_app
from services.gateway.cancelling import cancel_and_wait
from services.gateway.http.connection import BoundedProtocol
from services.gateway.settings import Settings
from services.gateway.state import GatewayState
from services.gateway.text.tokenizer import TextTokenizer
from shared.errors import ConfigError

BACKLOG = 2048
BACKSTOP_S = 5
"""After the grace period streams end by an error; connections still open this much later are cut."""

logger = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """Uvicorn that ends in order: not ready, no new connections, streams finish within the grace period, exit 0."""

    def __init__(self, settings: Settings, tokenizer: TextTokenizer) -> None:
        self._settings = settings
        self._signals = 0
        self.exit_code = 0
        self.app: FastAPI = create_app(settings, tokenizer, self._on_fatal)
        super().__init__(_config(self.app, settings))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The loop handles signals; uvicorn's own way would end the process by the signal, not by exit code 0."""
        yield

    async def run_until_signal(self) -> int:
        """Serve until SIGTERM or SIGINT; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.begin_exit)
        sockets = open_sockets(self._settings)
        logger.info("listening on %s", ", ".join(_address(sock) for sock in sockets))
        await self.serve(sockets)
        # uvicorn does not raise when the application cannot start
        return self.exit_code if self.lifespan.should_exit is False else 1

    def begin_exit(self) -> None:
        """First call: drain. Second call: end at once."""
        self._signals += 1
        if self._signals > 1:
            self.force_exit = self.should_exit = True
            self._end_streams()
            return
        loop = asyncio.get_running_loop()
        delay, grace = self._settings.drain_delay_s, self._settings.shutdown_grace_s
        logger.info("draining: streams may finish within %.0f s", grace)
        gateway = self._gateway()
        if gateway is not None:
            gateway.start_draining()
        loop.call_later(delay + grace, self._end_streams)
        loop.call_later(delay, setattr, self, "should_exit", True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Forced or not, the application ends in order: what it still has to tell Redis is told, its lease given back.
        Uvicorn forgets that if it is forced."""
        await super().shutdown(sockets)
        if self.force_exit:
            await cancel_and_wait(*self.server_state.tasks)
            await self.lifespan.shutdown()

    def _end_streams(self) -> None:
        gateway = self._gateway()
        if gateway is not None:
            gateway.engine.reader.fail_all("shutting_down", "this gateway is shutting down")

    def _gateway(self) -> GatewayState | None:
        gateway: GatewayState | None = getattr(self.app.state, "gateway", None)
        return gateway

    def _on_fatal(self) -> None:
        self.exit_code = 1
        self.should_exit = True
        gateway = self._gateway()
        if gateway is not None:
            gateway.engine.reader.fail_all("internal_error", "this gateway failed")


def open_sockets(settings: Settings) -> list[socket.socket]:
    """The port that clients know, maybe shared with other gateways, and the private one, if there is one.

    Raises:
        ConfigError: a port is in use.
    """
    ports = [(settings.port, settings.reuse_port)]
    ports += [(settings.private_port, False)] if settings.private_port else []
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        for port, is_shared in ports:
            family, kind, _, _, address = socket.getaddrinfo(
                settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            sockets.append(_bound(socket.socket(family, kind), address, is_shared))
    except OSError as error:
        for each in sockets:
            each.close()
        raise ConfigError(f"cannot listen on {settings.host} port {port}: {error.strerror or error}") from error
    return sockets


def _bound(sock: socket.socket, address: Any, is_shared: bool) -> socket.socket:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        return sock
    except OSError:
        sock.close()
        raise


def _address(sock: socket.socket) -> str:
    """For people; says which port it is if any was asked for."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        backlog=BACKLOG,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_delay_s + settings.shutdown_grace_s) + BACKSTOP_S,
    )


class HideCutBodies(logging.Filter):
    """Drops uvicorn's complaint about a body that we cut on purpose after an error event; that is logged elsewhere."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "ASGI callable returned without completing response."
