"""The same load through the whole stack: HTTP, gateway, Redis, scheduler, worker. Who used the processors meanwhile."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from services.cli.bench import Load, Report, run_load
from services.gpu_worker.profile import Part
from tests.harness.stack import Stack

AROUND = ("gateway", "scheduler", "redis")
"""Everything that an in-process engine does without."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a run took. Seconds."""

    report: Report
    cpu: Mapping[str, float]
    """Of all processes of a service."""
    parts: Mapping[str, float]
    """Of the worker's turns."""

    @property
    def share_around(self) -> float:
        """Share of the stack's CPU time that gateway, scheduler and Redis used."""
        return sum(self.cpu[service] for service in AROUND) / sum(self.cpu.values())

    @property
    def plan_wait(self) -> float:
        """Time without a plan, as a share of the time of steps."""
        return self.parts[Part.PLAN_WAIT] / self.parts[Part.STEP]


def run(stack: Stack, load: Load) -> Usage:
    """Put `load` on the stack.

    Raises:
        RuntimeError: a request failed.
    """
    pids = stack.pids()
    before, parts = cpu_seconds(pids), step_seconds(stack)
    report = asyncio.run(run_load(load))
    after = cpu_seconds(pids)
    if report.errors:
        raise RuntimeError(f"{report.errors} requests failed: {report.error_messages}")
    stack.wait_idle()  # the worker's profile comes with its lease, every half second
    return Usage(
        report,
        {service: after[service] - before[service] for service in after},
        {part: seconds - parts[part] for part, seconds in step_seconds(stack).items()},
    )


def cpu_seconds(pids: Mapping[str, list[int]]) -> dict[str, float]:
    """User and system time so far, by service."""
    return {service: sum(_cpu_seconds(pid) for pid in of) for service, of in pids.items()}


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def step_seconds(stack: Stack) -> dict[str, float]:
    """Seconds of each part of the workers' turns so far."""
    return {str(part): stack.metric("worker_step_seconds_sum", part=str(part)) for part in Part}
