"""Fixtures that every tier may use: Hypothesis profiles and a real Redis."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from services.cli.ports import free_port
from services.cli.redis_server import find_redis_server
from shared.keys import Keys
from shared.redis_client import connect

# Torch in this process and the stacks under test share the cores: threads that spin long at barriers starve the rest.
# Read once, when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# No test needs a GPU: Triton's interpreter runs the kernels. Read once as well, when Triton is loaded.
os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell that starts the tests in the background makes them ignore Ctrl-C, and every process that they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.harness.fixtures"]
STACK_TIERS = ("e2e", "fault")

_slow = [HealthCheck.too_slow]
settings.register_profile("suite", deadline=None, suppress_health_check=_slow, derandomize=True)
settings.register_profile("thorough", deadline=None, suppress_health_check=_slow, max_examples=2000)
settings.load_profile("suite")


class ByStack(LoadScopeScheduling):
    """For `-n`: files stay whole, and whole stacks, which use every core, run one at a time."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "stack" if path.split("/")[1] in STACK_TIERS else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByStack:
    return ByStack(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Stacks start first: they take longest."""
    items.sort(key=lambda item: item.path.relative_to(Path(__file__).parent).parts[0] not in STACK_TIERS)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis of this test session's own (AOF on, as in production)."""
    folder: Path = tmp_path_factory.mktemp("redis")
    port = free_port()
    command = [
        str(find_redis_server().path),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(folder),
        "--save",
        "",
    ]
    command += ["--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"redis://127.0.0.1:{port}/0"
    client = connect(url)
    try:
        for _ in range(100):
            try:
                client.ping()
                break
            except redis.RedisError:
                time.sleep(0.05)
        else:
            raise RuntimeError((folder / "log").read_text())
        yield url
    finally:
        client.close()
        process.terminate()
        process.wait(10)


@pytest.fixture
def redis_url(redis_server: str) -> Iterator[str]:
    """An empty Redis."""
    client = connect(redis_server)
    client.flushall()
    client.config_resetstat()
    yield redis_server
    client.close()


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


@pytest.fixture
def keys() -> Keys:
    return Keys("test")
