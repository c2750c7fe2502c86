"""The state directory of one `pagewire up`: its lock, the record of what runs, logs and Redis' files."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil

from shared.errors import ConfigError

SERVICES = ("gateway", "scheduler", "gpu_worker", "redis")
_CLOCK_TOLERANCE_S = 1.0


class ChildState(msgspec.Struct, frozen=True):
    """One child process, as the state file records it."""

    service: str
    name: str
    pid: int
    started: float
    """Unix time at which the kernel says the process started: tells it from a later process of the same pid."""
    instance: str = ""

    @property
    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _CLOCK_TOLERANCE_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class RunState(msgspec.Struct, frozen=True):
    """What `pagewire up` says of itself in the state file."""

    pid: int
    url: str
    """As it was told to people."""
    local_url: str
    """As this machine reaches it."""
    redis_url: str
    """Holds the password of an own Redis: the file is readable by its owner only."""
    pool: str
    model: str
    children: tuple[ChildState, ...] = ()
    gateways: dict[str, str] = {}
    """Name → the address of that gateway alone, as this machine reaches it."""


def process_start_time(pid: int) -> float:
    """Unix time at which `pid` started; 0 if it is gone."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _try_lock(descriptor: int) -> bool:
    """Take the lock; tries for a moment, because `is_locked` of another process holds it for one."""
    for _ in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


class StateDir:
    """Paths below the state directory, and the state file."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def state_file(self) -> Path:
        return self.path / "state.json"

    def create(self) -> None:
        """Make the folders, closed to other users: logs and the append-only file hold prompts.

        Raises:
            ConfigError: they cannot be made.
        """
        try:
            for folder in (self.path, self.redis, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"state directory {self.path}: {error.strerror}") from error

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory for this process; the kernel releases it even on SIGKILL.

        Raises:
            ConfigError: another `pagewire up` holds it.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _try_lock(descriptor):
                raise ConfigError(self._occupied())
            yield
        finally:
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether a `pagewire up` holds the directory now."""
        try:
            with self.lock():
                return False
        except ConfigError:
            return True
        except OSError:
            return False  # no such directory

    def _occupied(self) -> str:
        state = self.read()
        who = f" (pid {state.pid}, {state.url})" if state else ""
        return f"another pagewire{who} uses the state directory {self.path}; stop it or give another --state-dir"

    def read(self) -> RunState | None:
        """The record of the last run, or None if there is none that can be read."""
        try:
            return msgspec.json.decode(self.state_file.read_bytes(), type=RunState)
        except (OSError, msgspec.DecodeError):
            return None

    def write(self, state: RunState) -> None:
        """Replace the state file in one step."""
        temporary = self.state_file.with_suffix(".tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(state))
        temporary.replace(self.state_file)

    def clear(self) -> None:
        """Remove the state file: nothing runs any more."""
        self.state_file.unlink(missing_ok=True)

    def live_pids(self) -> dict[str, list[int]]:
        """Pids of the children that live, per service; empty lists if nothing runs."""
        state = self.read()
        children = state.children if state else ()
        return {service: [c.pid for c in children if c.service == service and c.is_alive] for service in SERVICES}
