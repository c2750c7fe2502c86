"""Case 116: gateway, scheduler, worker and Redis come up in any order, and health says what is missing meanwhile."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from services.cli.redis_server import find_redis_server, prepare
from services.gateway.text.tokenizer import TextTokenizer
from shared.keys import Keys
from tests.fakes.gateway_server import RunningGateway
from tests.harness.own_redis import running
from tests.integration.scheduler.conftest import Pool, wait_for

ORDERS = (
    ("gateway", "worker", "scheduler", "redis"),
    ("scheduler", "gateway", "redis", "worker"),
    ("worker", "redis", "gateway", "scheduler"),
    ("redis", "gateway", "scheduler", "worker"),
    ("worker", "scheduler", "gateway", "redis"),
)
NUM_TOKENS = 8


def missing(started: set[str]) -> str | None:
    """What `/health/ready` is to say."""
    for service, reason in (("redis", "redis_unreachable"), ("scheduler", "no_leader"), ("worker", "no_worker")):
        if service not in started:
            return reason
    return None


def serve(stack: ExitStack, pool: Pool) -> None:
    """A scheduler, as its process runs it."""
    scheduler = pool.scheduler()
    thread = threading.Thread(target=scheduler.service.run, args=(scheduler.stop_event,), daemon=True)
    thread.start()
    stack.callback(scheduler.service.close)
    stack.callback(thread.join, 20)
    stack.callback(scheduler.stop_event.set)


def start(service: str, stack: ExitStack, pool: Pool, gateway: RunningGateway) -> None:
    if service == "gateway":
        stack.enter_context(gateway)
    elif service == "scheduler":
        serve(stack, pool)
    else:
        stack.callback(pool.worker().stop)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_services_wait_for_each_other(
    order: tuple[str, ...], tmp_path: Path, byte_model: Path, byte_tokenizer: TextTokenizer, keys: Keys
) -> None:
    own = prepare(tmp_path, find_redis_server())
    pool, started = Pool(own.url, keys), set[str]()
    gateway = RunningGateway(byte_tokenizer, model=byte_model, redis_url=own.url, pool=keys.pool)

    def told() -> Any:
        return gateway.http.get("/health/ready").json().get("reason")

    with ExitStack() as servers, ExitStack() as stack:
        for service in order:
            if service == "redis":
                servers.enter_context(running(own))
            else:
                start(service, stack, pool, gateway)
            started.add(service)
            time.sleep(0.2)
            if "gateway" in started:
                wait_for(lambda: told() == missing(started))
        body = {"prompt": [65, 66, 67], "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answered = gateway.http.post("/v1/completions", json=body)
        assert answered.json()["usage"]["completion_tokens"] == NUM_TOKENS
        assert pool.health()
        pool.client.close()
