"""Which programs make a stack, and the environment that each gets. Only here all settings are known."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from services.cli.redis_server import OwnRedis, remove_remains
from services.cli.settings import Settings, extra_of
from services.cli.supervisor import ChildSpec
from shared.context_length import context_length
from shared.errors import ConfigError

SHUTDOWN_GRACE_S = 5.0
"""How long a gateway under `pagewire up` lets streams finish after Ctrl-C; PAGEWIRE_SHUTDOWN_GRACE_S overrides."""

MODULES = {
    "gateway": "services.gateway",
    "scheduler": "services.scheduler",
    "gpu_worker": "services.gpu_worker",
}


def command(service: str) -> tuple[str, ...]:
    """The command line of one service; all of its options are in its environment."""
    return (sys.executable, "-m", MODULES[service])


def shared_environment(
    settings: Settings, base: Mapping[str, str], *, redis_url: str, model: Path, served_name: str
) -> dict[str, str]:
    """`base` with every option that was given. An option that was not given is left to the service's default."""
    forwarded = {name.upper(): getattr(settings, name) for name in Settings.model_fields if extra_of(name)["forward"]}
    options = {
        **forwarded,
        "REDIS_URL": redis_url,
        "HOME": settings.home.expanduser(),
        "MODEL": model,
        "SERVED_MODEL_NAME": served_name,
        "RECORD": settings.record and settings.record.expanduser().absolute(),
        "MAX_MODEL_LEN": settings.max_model_len or _context_length(model),
    }
    given = {f"PAGEWIRE_{name}": str(value) for name, value in options.items() if value is not None}
    return {**base, "PYTHONUNBUFFERED": "1", **given}


def _context_length(model: Path) -> int | None:
    """The longest row that the model in this folder was made for; None leaves it to the worker, who reads the weights.

    Raises:
        ConfigError: there is no configuration.
    """
    try:
        return context_length(json.loads((model / "config.json").read_bytes()))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{model / 'config.json'}: {error}") from error


def redis_spec(own: OwnRedis, base: Mapping[str, str]) -> ChildSpec:
    """The stack's own Redis."""
    folder = own.config.parent
    return ChildSpec("redis", "redis", own.command, base, has_lease=False, before_start=lambda: remove_remains(folder))


def gateway_spec(
    settings: Settings, environment: Mapping[str, str], port: int, index: int = 0, private_port: int = 0
) -> ChildSpec:
    """Gateway `index`. With a private port it shares `port` with others."""
    name = f"gateway-{index}"
    own = {
        "PAGEWIRE_NAME": name,
        "PAGEWIRE_HOST": settings.host,
        "PAGEWIRE_PORT": str(port),
        "PAGEWIRE_CORS_ORIGINS": ",".join(settings.cors_origin or ()),
    }
    if settings.api_key is not None:
        own["PAGEWIRE_API_KEY"] = settings.api_key.get_secret_value()
    if settings.api_key_file is not None:
        own["PAGEWIRE_API_KEY_FILE"] = str(settings.api_key_file.expanduser().absolute())
    if settings.insecure:
        own["PAGEWIRE_INSECURE"] = "true"
    shared = {"PAGEWIRE_REUSE_PORT": "true", "PAGEWIRE_PRIVATE_PORT": str(private_port)} if private_port else {}
    grace = {"PAGEWIRE_SHUTDOWN_GRACE_S": str(SHUTDOWN_GRACE_S), **_picked(environment, "PAGEWIRE_SHUTDOWN_GRACE_S")}
    return ChildSpec(
        "gateway",
        name,
        command("gateway"),
        {**environment, **own, **shared, **grace},
        stop_timeout_s=_seconds(grace["PAGEWIRE_SHUTDOWN_GRACE_S"]) + 5.0,
    )


def _picked(environment: Mapping[str, str], name: str) -> dict[str, str]:
    return {name: environment[name]} if name in environment else {}


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return SHUTDOWN_GRACE_S  # the gateway itself will refuse the value


def scheduler_spec(environment: Mapping[str, str], index: int = 0) -> ChildSpec:
    """Scheduler `index`: the leader, or one that stands by."""
    name = f"scheduler-{index}"
    return ChildSpec("scheduler", name, command("scheduler"), {**environment, "PAGEWIRE_NAME": name})


def worker_spec(environment: Mapping[str, str], index: int, count: int) -> ChildSpec:
    """Worker `index` of `count`: it takes its share of the machine's cores or GPUs."""
    own = {
        "PAGEWIRE_NAME": f"worker-{index}",
        "PAGEWIRE_WORKER_INDEX": str(index),
        "PAGEWIRE_NUM_WORKERS": str(count),
    }
    return ChildSpec("gpu_worker", f"worker-{index}", command("gpu_worker"), {**environment, **own})
