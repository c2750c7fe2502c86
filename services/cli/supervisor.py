"""Keeps child processes alive, and takes them along when it ends.

Every child is started from the main thread, on a leash (see `leash.py`: the kernel kills it when that thread ends), in
a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone and it can end the children in order.

    STARTING   a child that exits is an error: `ChildFailed`
    RUNNING    a child that exits is reported at once and started again: immediately, then with growing delay
    STOPPING   gateway, scheduler, workers, Redis: each group gets SIGTERM, time, SIGKILL
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from services.cli.backoff import Backoff
from services.cli.signals import SignalInbox, StopRequested
from services.cli.state_dir import SERVICES, ChildState, process_start_time
from shared.errors import PagewireError

LEASH = Path(__file__).with_name("leash.py")
TAIL_LINES = 15
KEEP_LOG_BYTES = 8 * 1024 * 1024


class ChildFailed(PagewireError):
    """A child ended while the stack was starting."""

    def __init__(self, name: str, returncode: int, tail: list[str], log: Path) -> None:
        super().__init__(f"{name} {_describe(returncode)} while starting{': ' + tail[-1] if tail else ''}")
        self.name = name
        self.returncode = returncode
        self.tail = tail
        self.log = log


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to keep alive."""

    service: str
    """One of `SERVICES`."""
    name: str
    """Stable over restarts, e.g. `worker-0`; names the log file."""
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """The whole environment; PAGEWIRE_INSTANCE is added at each start."""
    has_lease: bool = True
    """Whether its death is to be reported to the pool."""
    stop_timeout_s: float = 10.0
    before_start: Callable[[], None] = lambda: None
    """Called before each start, when no former process of the child is there."""


@dataclass(slots=True)
class Child:
    """A child and its current process, if it has one."""

    spec: ChildSpec
    log: Path
    backoff: Backoff
    log_start: int = 0
    """Where the current process's output begins in the log."""
    process: "subprocess.Popen[bytes] | None" = None
    instance: str = ""
    started_at: float = 0.0
    """Monotonic."""
    restart_at: float | None = None
    num_restarts: int = 0
    state: ChildState | None = None


def start_on_leash(
    command: tuple[str, ...], environment: Mapping[str, str], *, output: int | None, error: int | None = None
) -> "subprocess.Popen[bytes]":
    """Start `command` as a child that dies with the calling thread (so: the main thread), in its own session."""
    return subprocess.Popen(
        (sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output if error is None else error,
        env=dict(environment),
        start_new_session=True,
    )


def kill_group(pid: int, signum: int) -> None:
    """Signal every process of the group that `pid` leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def log_tail(log: Path, start: int, count: int = TAIL_LINES) -> list[str]:
    """The last lines after byte `start` of a log that hold something."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()][-count:]


class Supervisor:
    """Starts, watches, restarts and ends children. Main thread only.

    `new_instance` names each process start, `report_death(instance)` tells the pool of an ended one, `on_change` is
    called when the set of processes changed, `notice` receives lines for people.
    """

    def __init__(
        self,
        inbox: SignalInbox,
        logs: Path,
        *,
        new_instance: Callable[[], str],
        report_death: Callable[[str], None],
        notice: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._inbox = inbox
        self._logs = logs
        self._new_instance = new_instance
        self._report_death = report_death
        self._notice = notice
        self._on_change = on_change
        self._backoff = backoff
        self._restarting = False
        self.children: list[Child] = []

    # ------------------------------------------------------------ starting

    def start(self, spec: ChildSpec) -> Child:
        """Start one more child and keep it."""
        child = Child(spec, self._logs / f"{spec.name}.log", self._backoff())
        self.children.append(child)
        self._spawn(child)
        return child

    def _spawn(self, child: Child) -> None:
        child.instance = self._new_instance()
        child.restart_at = None
        child.spec.before_start()
        environment = {**child.spec.environment, "PAGEWIRE_INSTANCE": child.instance}
        with self._open_log(child.log) as log:
            child.log_start = log.tell()
            child.process = start_on_leash(child.spec.command, environment, output=log.fileno())
        child.started_at = time.monotonic()
        child.state = ChildState(
            child.spec.service,
            child.spec.name,
            child.process.pid,
            process_start_time(child.process.pid),
            child.instance,
        )
        self._on_change()

    def _open_log(self, log: Path) -> BinaryIO:
        if log.exists() and log.stat().st_size > KEEP_LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
        return log.open("ab")

    def states(self) -> tuple[ChildState, ...]:
        """The children that have a process now."""
        return tuple(child.state for child in self.children if child.process is not None and child.state is not None)

    # ------------------------------------------------------------ watching

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s`, but see a child's end at once.

        Raises:
            StopRequested: a stop signal came.
            ChildFailed: a child ended and `keep_alive` was not called yet.
        """
        due = [child.restart_at - time.monotonic() for child in self.children if child.restart_at is not None]
        if self._inbox.wait(min([timeout_s, *due])):
            raise StopRequested
        for child in self.children:
            self._look_after(child)

    def keep_alive(self) -> None:
        """The stack is up: from now on children that end are started again."""
        self._restarting = True

    def run(self) -> None:
        """Keep the children alive until a stop signal comes."""
        self.keep_alive()
        with contextlib.suppress(StopRequested):
            while True:
                self.wait(60.0)

    def _look_after(self, child: Child) -> None:
        if child.process is not None and child.process.poll() is not None:
            self._bury(child, child.process)
        if child.restart_at is not None and child.restart_at <= time.monotonic():
            child.num_restarts += 1
            self._spawn(child)

    def _bury(self, child: Child, process: "subprocess.Popen[bytes]") -> None:
        self._collect(child, process)
        if not self._restarting:
            raise ChildFailed(child.spec.name, process.returncode, log_tail(child.log, child.log_start), child.log)
        delay = child.backoff.next_delay(time.monotonic() - child.started_at)
        child.restart_at = time.monotonic() + delay
        when = f"in {delay:.1f} s" if delay else "now"
        self._notice(f"{child.spec.name} (pid {process.pid}) {_describe(process.returncode)}; starting it again {when}")
        self._on_change()

    def _collect(self, child: Child, process: "subprocess.Popen[bytes]") -> None:
        """The process ended: report it first, because requests wait, then sweep what it left in its group."""
        child.process = None
        if child.spec.has_lease:
            self._report_death(child.instance)
        kill_group(process.pid, signal.SIGKILL)

    # ------------------------------------------------------------ stopping

    def stop(self) -> None:
        """End all children in the order of `SERVICES`; a stop signal meanwhile kills what is left at once."""
        for child in self.children:
            child.restart_at = None
        try:
            for service in SERVICES:
                self._stop_group([c for c in self.children if c.spec.service == service and c.process is not None])
        except StopRequested:
            self._notice("killing what is left")
        finally:
            self._kill_rest()
            self._on_change()

    def _stop_group(self, group: list[Child]) -> None:
        deadline = time.monotonic() + max((child.spec.stop_timeout_s for child in group), default=0.0)
        for child in group:
            if child.process is not None:
                child.process.terminate()
        while self._reap(group) and time.monotonic() < deadline:
            if self._inbox.wait(min(0.1, deadline - time.monotonic())):
                raise StopRequested
        for child in group:
            if child.process is not None:
                self._notice(f"{child.spec.name} did not end within {child.spec.stop_timeout_s:g} s: killed")
                self._kill(child, child.process)

    def _reap(self, group: list[Child]) -> bool:
        """Whether some of `group` still live."""
        for child in group:
            if child.process is not None and child.process.poll() is not None:
                kill_group(child.process.pid, signal.SIGKILL)
                child.process = None
        return any(child.process is not None for child in group)

    def _kill_rest(self) -> None:
        for child in self.children:
            if child.process is not None:
                self._kill(child, child.process)

    def _kill(self, child: Child, process: "subprocess.Popen[bytes]") -> None:
        kill_group(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        child.process = None
