"""Carries out faults on a running stack, and makes sure that each one hit: a fault that did nothing is an error."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.cli.state_dir import ChildState
from shared.fault_points import FaultPoint
from tests.harness.chaos_plan import Action, Fault, FaultKind
from tests.harness.pool_state import PoolState, wait_for

TRIGGERS = {
    FaultPoint.WORKER_FENCED: "gpu_worker",
    FaultPoint.EPOCH_ACQUIRED: "scheduler",
    FaultPoint.TICKS_REPLAYED: "scheduler",
}
"""Windows in which nobody is unless something happened before: the service of which a process is killed for it."""


def services_struck(kind: FaultKind) -> tuple[str, ...]:
    """Of whom a process dies."""
    trigger = TRIGGERS.get(FaultPoint(kind.point)) if kind.point else None
    return tuple(sorted({kind.service, trigger or kind.service}))


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that was carried out. Times are monotonic."""

    fault: Fault
    at: float
    victim: str
    """Name and pid."""
    num_in_flight: int
    """Streams, at that moment."""


class Injector:
    """Faults, one at a time. `fault_dir` is the `PAGEWIRE_FAULT_DIR` of the stack."""

    def __init__(self, pool: PoolState, fault_dir: Path) -> None:
        self._pool = pool
        self._fault_dir = fault_dir

    def carry_out(self, fault: Fault, count: Callable[[], int]) -> Hit:
        """Returns when the fault has hit, a pause when it is over. `count` says how many streams are in flight.

        Raises:
            TimeoutError: it did not hit.
        """
        if fault.kind.action is Action.WINDOW:
            at, pid = self.in_window(FaultPoint(fault.kind.point), index=fault.index)
            return Hit(fault, at, f"{fault.kind.service} {pid}", count())
        child = self._choose(fault)
        at, num_in_flight = time.monotonic(), count()
        if fault.kind.action is Action.PAUSE:
            self.pause(child, fault.seconds)
        else:
            self.end(child, signal.SIGKILL if fault.kind.action is Action.KILL else signal.SIGTERM)
        return Hit(fault, at, f"{child.name} {child.pid}", num_in_flight)

    def _choose(self, fault: Fault) -> ChildState:
        found = wait_for(f"a {fault.kind.service}", lambda: self._pool.children(fault.kind.service))
        return found[fault.index % len(found)]

    def _trigger(self, service: str, index: int) -> ChildState:
        """A process whose death leads somebody into a window: of schedulers only the leader's does."""
        if service == "scheduler":
            return wait_for("a leader", self._pool.leading_child)
        found = wait_for(f"a {service}", lambda: self._pool.children(service))
        return found[index % len(found)]

    def end(self, child: ChildState, number: signal.Signals = signal.SIGKILL, seconds: float = 60.0) -> None:
        """Signal a process and see it go."""
        os.kill(child.pid, number)
        wait_for(f"the end of {child.name}", lambda: not child.is_alive, seconds)

    def pause(self, child: ChildState, seconds: float) -> None:
        """Stop a process for `seconds`, and see that it stood."""
        process = psutil.Process(child.pid)
        process.suspend()
        try:
            wait_for(f"the stop of {child.name}", lambda: process.status() == psutil.STATUS_STOPPED)
            time.sleep(seconds)
            if process.status() != psutil.STATUS_STOPPED:
                raise TimeoutError(f"{child.name} did not stand for {seconds:g} s")
        finally:
            process.resume()

    def in_window(
        self, point: FaultPoint, number: signal.Signals = signal.SIGKILL, *, index: int = 0, seconds: float = 60.0
    ) -> tuple[float, int]:
        """Let the next process that passes `point` suffer `number` there; when (monotonic), and its pid."""
        armed = self._fault_dir / f"{point}.new"
        armed.write_text(number.name)
        armed.rename(self._fault_dir / point)
        try:
            if service := TRIGGERS.get(point):
                self.end(self._trigger(service, index))
            claimed = wait_for(f"a process at {point}", lambda: next(self._fault_dir.glob(f"{point}.*"), None), seconds)
        finally:
            (self._fault_dir / point).unlink(missing_ok=True)
        at, pid = time.monotonic(), int(claimed.suffix[1:])
        claimed.unlink()
        wait_for(f"{number.name} of {pid} at {point}", lambda: _has_suffered(pid, number))
        return at, pid


def _has_suffered(pid: int, number: signal.Signals) -> bool:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return number is not signal.SIGSTOP
    return status == (psutil.STATUS_STOPPED if number is signal.SIGSTOP else psutil.STATUS_ZOMBIE)
