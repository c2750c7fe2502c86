"""Which cores belong to which worker. Runs before torch is imported, because its thread pools read the result."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Partition:
    """The share of one worker."""

    cores: tuple[int, ...]
    """Logical cores, sorted."""
    num_threads: int
    """Compute threads: one per physical core of the share, within the container's quota."""


def divide(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """Share `index` of `count` of the sorted `cores`: neighbours stay together; sizes differ by at most one.

    With fewer cores than workers, each has one core and some share it.
    """
    if len(cores) <= count:
        return (cores[index % len(cores)],)
    bounds = [len(cores) * i // count for i in (index % count, index % count + 1)]
    return tuple(cores[bounds[0] : bounds[1]])


def plan_partition(index: int, count: int) -> Partition:
    """The share of worker `index` of `count` on this machine."""
    cores = divide(_cores_by_package(_allowed_cores()), index, count)
    quota = _cpu_quota()
    num_threads = len({_physical_core(core) for core in cores})
    if quota is not None:
        num_threads = min(num_threads, max(1, math.floor(quota / count)))
    return Partition(tuple(sorted(cores)), num_threads)


def thread_environment(partition: Partition) -> dict[str, str]:
    """Variables that the OpenMP runtimes read when torch is imported (GNU's in torch's own wheels, else Intel's).

    By default a thread that waits at a barrier spins for milliseconds, also on a core that its partner needs. Measured
    on 2 cores shared with other work, a decode step of 8 rows of a 135M model: 5.1 s; 0.28 s with 1000 spins (some
    50 µs, which still covers the gaps between two operators); 0.97 s with 10,000; 0.33 s without any.
    Alone on the cores, 1000 cost 2 % at 32 rows (103 against 100 ms) and a fifth at one row (49 against 41 ms).
    """
    return {"OMP_NUM_THREADS": str(partition.num_threads), "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}


def apply_partition(partition: Partition) -> None:
    """Pin this process (and all threads that it will start) to its cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, partition.cores)


def _allowed_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cores_by_package(cores: Sequence[int]) -> list[int]:
    """`cores` so that those of one socket, and hyperthreads of one core, are neighbours."""
    return sorted(cores, key=lambda core: (_topology(core, "physical_package_id"), _physical_core(core), core))


def _physical_core(core: int) -> tuple[str, str]:
    """Equal for hyperthreads of one core."""
    return _topology(core, "physical_package_id"), _topology(core, "core_id")


def _topology(core: int, name: str) -> str:
    """Zero-padded, so that it sorts as a number. A machine that tells nothing has distinct cores on one socket."""
    try:
        return (_CPU_TOPOLOGY / f"cpu{core}" / "topology" / name).read_text().strip().zfill(6)
    except OSError:
        return str(core if name == "core_id" else 0).zfill(6)


def _cpu_quota() -> float | None:
    """Cores' worth of time that the container may use; None without a limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)
