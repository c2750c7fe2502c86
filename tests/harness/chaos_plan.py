"""Which faults come when: a pure function of a seed and of how many of each kind are wanted."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shared.fault_points import FaultPoint


class Action(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    TERM = "term"
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT after `Fault.seconds`."""
    WINDOW = "window"
    """kill -9 by itself, in the named window `Fault.point`."""


@dataclass(frozen=True, slots=True, order=True)
class FaultKind:
    """What can be wanted several times."""

    action: Action
    service: str
    """Whose process: `gateway`, `scheduler`, `gpu_worker`, `redis`."""
    point: str = ""
    """A `FaultPoint`, for a window."""

    def __str__(self) -> str:
        return f"{self.service} {self.point or self.action}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, `after_s` seconds after the pool has recovered from the one before."""

    kind: FaultKind
    after_s: float
    index: int
    """Which of the service's processes, counted round."""
    seconds: float = 0.0
    """How long a pause lasts."""


KILLS = tuple(FaultKind(Action.KILL, service) for service in ("gateway", "scheduler", "gpu_worker"))
TERMS = tuple(FaultKind(Action.TERM, kind.service) for kind in KILLS)
PAUSES = tuple(FaultKind(Action.PAUSE, kind.service) for kind in KILLS)
WINDOWS = (
    FaultKind(Action.WINDOW, "gateway", FaultPoint.REQUEST_SUBMITTED),
    FaultKind(Action.WINDOW, "gpu_worker", FaultPoint.STEP_COMPUTED),
    FaultKind(Action.WINDOW, "gpu_worker", FaultPoint.STEP_PUBLISHED),
    FaultKind(Action.WINDOW, "gpu_worker", FaultPoint.BLOCKS_COPIED),
    FaultKind(Action.WINDOW, "scheduler", FaultPoint.TICK_DECIDED),
    FaultKind(Action.WINDOW, "scheduler", FaultPoint.TICK_COMMITTED),
    FaultKind(Action.WINDOW, "scheduler", FaultPoint.WORKER_FENCED),
    FaultKind(Action.WINDOW, "scheduler", FaultPoint.EPOCH_ACQUIRED),
    FaultKind(Action.WINDOW, "scheduler", FaultPoint.TICKS_REPLAYED),
)
LONGEST_WAIT_S = 1.5
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 2.5, 5.0
"""A lease lives 2 s: every pause is longer."""


def plan_faults(seed: int, wanted: Mapping[FaultKind, int]) -> list[Fault]:
    """As many faults of each kind as wanted, in an order and at moments that the seed decides."""
    rng = random.Random(seed)
    kinds = [kind for kind in sorted(wanted) for _ in range(wanted[kind])]
    rng.shuffle(kinds)
    return [_fault(kind, rng) for kind in kinds]


def _fault(kind: FaultKind, rng: random.Random) -> Fault:
    after_s, index = rng.uniform(0, LONGEST_WAIT_S), rng.randrange(16)
    seconds = rng.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
    return Fault(kind, after_s, index, seconds if kind.action is Action.PAUSE else 0.0)


def spread(total: int, kinds: tuple[FaultKind, ...]) -> dict[FaultKind, int]:
    """`total` faults over `kinds`, as evenly as it goes."""
    return {kind: total // len(kinds) + (place < total % len(kinds)) for place, kind in enumerate(kinds)}
