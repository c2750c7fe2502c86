"""A real gateway, served by uvicorn in a thread of the test process."""

import asyncio
import threading
import time
from typing import Any, Self

import httpx
import openai
import uvloop

from services.gateway.server import GatewayServer, open_sockets
from services.gateway.settings import Settings
from services.gateway.state import GatewayState
from services.gateway.text.tokenizer import TextTokenizer


class RunningGateway:
    """`with RunningGateway(tokenizer, model=folder, redis_url=…): …`; further arguments are settings."""

    def __init__(self, tokenizer: TextTokenizer, **settings: Any) -> None:
        values = {"port": 0, "pool": "test", "served_model_name": ("bytes", "alias"), **settings}
        given = Settings(**values)
        self._sockets = open_sockets(given)
        self.settings = given.model_copy(update={"port": self._sockets[0].getsockname()[1]})
        self.url = f"http://127.0.0.1:{self.settings.port}"
        self.server = GatewayServer(self.settings, tokenizer)
        self.loop = uvloop.new_event_loop()
        self._is_told_to_exit = False
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self.http = httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    @property
    def state(self) -> GatewayState:
        state: GatewayState = self.server.app.state.gateway
        return state

    def __enter__(self) -> Self:
        self._thread.start()
        until = time.monotonic() + 10
        while not self.server.started:
            assert self._thread.is_alive() and time.monotonic() < until, "the gateway did not start"
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.stop()

    def begin_exit(self) -> None:
        """As on SIGTERM. A second call is as a second SIGTERM: what runs is cut."""
        self._is_told_to_exit = True
        self.loop.call_soon_threadsafe(self.server.begin_exit)

    def stop(self) -> None:
        """As on SIGTERM, unless that came before; returns when the server has ended."""
        if self._thread.is_alive() and not self._is_told_to_exit:
            self.begin_exit()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the gateway did not end"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # as its process does
            runner.run(self.server.serve(self._sockets))

    def wait_ready(self, timeout_s: float = 10.0) -> Self:
        """Return when requests are accepted."""
        self.wait_for(lambda: self.http.get("/health/ready").status_code == 200, timeout_s)
        return self

    def wait_for(self, condition: Any, timeout_s: float = 10.0) -> Any:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if value := condition():
                return value
            time.sleep(0.02)
        raise AssertionError(f"nothing within {timeout_s} s; health: {self.http.get('/health').text}")

    def metric(self, name: str, **labels: str) -> float:
        """One sample; 0 if it is absent."""
        labels = {"model_name": self.settings.model_names[0], **labels}
        registry = self.state.engine.metrics.registry
        return registry.get_sample_value(self.settings.metrics_prefix + name, labels) or 0.0

    def openai(self) -> openai.OpenAI:
        """The official client, without retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)
