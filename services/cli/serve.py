"""`pagewire serve gateway|scheduler|worker`: this process becomes one service."""

import os
import re
import socket
import sys
from typing import NoReturn

from services.cli import composition, redis_server
from services.cli.settings import Settings
from services.cli.state_dir import StateDir
from shared.errors import ConfigError
from shared.model_store import resolve

SERVICES = {"gateway": "gateway", "scheduler": "scheduler", "worker": "gpu_worker"}
MAX_HOST = 40
"""Characters of the host's name that go into a seat's."""


def serve(settings: Settings, service: str, *, name: str | None = None, index: int = 0) -> NoReturn:
    """Replace this process by the service; `index` is a worker's place among `settings.workers` on this machine.
    Without a Redis URL it joins the `pagewire up` of the same state directory. A gateway or scheduler first
    tells, on standard error, which durability is in force.

    Raises:
        ConfigError: unknown service, no Redis, or the model was not pulled.
    """
    if service not in SERVICES:
        raise ConfigError(f"unknown service {service!r}: one of {', '.join(SERVICES)}")
    if index >= settings.workers:
        raise ConfigError(f"option index: {index} is not below --workers {settings.workers}")
    url = _redis_url(settings)
    file, arguments, environment = program(settings, SERVICES[service], url, name, index)
    if service != "worker":  # a worker's user of Redis may not ask
        _tell_durability(url, settings)
    os.execvpe(file, arguments, environment)


def _tell_durability(url: str, settings: Settings) -> None:
    """A Redis that is away now is none's fault: services wait for it."""
    redis_server.check_url(url)
    try:
        notes = redis_server.check_given(url, settings.durability)
    except ConfigError as error:
        notes = [f"warning: {error}"]
    print(*notes, sep="\n", file=sys.stderr, flush=True)


def program(
    settings: Settings, kind: str, redis_url: str, name: str | None, index: int
) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """What to execute: file, arguments, environment.

    Raises:
        ConfigError: the model was not pulled.
    """
    model = resolve(settings.model, settings.home)
    environment = composition.shared_environment(
        settings,
        os.environ,
        redis_url=redis_url,
        model=model.require_folder(),
        served_name=settings.served_model_name or model.served_name,
    )
    if kind == "gateway":
        spec = composition.gateway_spec(settings, environment, settings.port)
    elif kind == "scheduler":
        spec = composition.scheduler_spec(environment)
    else:
        spec = composition.worker_spec(environment, index, settings.workers)
    own = name or os.environ.get("PAGEWIRE_NAME") or _seat_here(spec.name)
    return spec.command[0], spec.command, {**spec.environment, "PAGEWIRE_NAME": own}


def _seat_here(name: str) -> str:
    """A name that no other machine gives, nor a `pagewire up`: of workers with one name the second is not admitted."""
    service, _, index = name.rpartition("-")
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:MAX_HOST]
    return f"{service}-{host}-{index}"


def joined_pool(settings: Settings) -> tuple[str, str]:
    """(Redis URL, pool): as given, else those of the `pagewire up` of the same state directory.

    Raises:
        ConfigError: no Redis is given, and nothing runs here.
    """
    state = StateDir(settings.state_dir).read()
    is_given = "pool" in settings.model_fields_set or settings.redis_url
    return _redis_url(settings), settings.pool if is_given or state is None else state.pool


def _redis_url(settings: Settings) -> str:
    if settings.redis_url:
        return settings.redis_url
    state_dir = StateDir(settings.state_dir)
    state = state_dir.read()
    if state is None or not state.redis_url or not state_dir.is_locked():
        raise ConfigError("no Redis: give --redis-url, set REDIS_URL, or start `pagewire up` first")
    return state.redis_url
