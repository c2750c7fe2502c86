"""The workers of a simulation: what they do when, and what of their time and blocks is used."""

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.simulator.latency import LatencyModel
from services.scheduler.simulator.measures import Level
from services.scheduler.simulator.worker import SimulatedWorker
from shared.errors import ConfigError
from shared.messages import CopyKind, StepPlan

Outputs = Mapping[str, tuple["array[int]", int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker's name and memory."""

    name: str
    num_blocks: int
    num_cpu_blocks: int = 0
    block_bytes: int = 0
    joins_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChange:
    """Something that happens to a worker."""

    at: float
    action: Literal["join", "kill", "drain"]
    """`join`: comes (again). `kill`: dies at once, whatever it does. `drain`: takes nothing more, then leaves."""
    worker: str


def parse_change(text: str) -> WorkerChange:
    """`12.5:kill:worker-3`.

    Raises:
        ConfigError: it is none.
    """
    at, _, rest = text.partition(":")
    action, _, worker = rest.partition(":")
    try:
        when = float(at)
    except ValueError:
        when = -1.0
    if not (0 <= when < float("inf") and worker and action in ("join", "kill", "drain")):
        raise ConfigError(f"worker change {text!r}: expected SECONDS:join|kill|drain:WORKER")
    return WorkerChange(at=when, action=action, worker=worker)  # type: ignore[arg-type]


@dataclass(slots=True)
class Seat:
    """One worker's name, over all of its incarnations."""

    spec: WorkerSpec
    incarnation: int = 0
    worker: SimulatedWorker | None = None
    draining: bool = False
    inbox: deque[tuple[float, StepPlan]] = field(default_factory=deque)
    """(when it is there, plan)."""
    step: int = 0
    """Rises with every step and death: an end of step that was foreseen before a death is none."""
    is_busy: bool = False
    last_tokens: float = 0.0
    """When the tokens of its last step were seen."""
    began: float = 0.0
    present_since: float = 0.0
    present_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    copied: dict[CopyKind, int] = field(default_factory=lambda: dict.fromkeys(CopyKind, 0))
    num_evictions: int = 0
    used: Level = field(default_factory=Level)
    cached: Level = field(default_factory=Level)
    slots: Level = field(default_factory=Level)
    """Slots of the blocks in block tables."""
    empty: Level = field(default_factory=Level)
    """Those of them that hold no token."""

    def join(self, outputs: Outputs, latency: LatencyModel, now: float) -> None:
        """A new incarnation."""
        self.incarnation += 1
        self.worker = SimulatedWorker(self.spec.name, self.incarnation, outputs, latency)
        self.draining, self.present_since = False, now

    def leave(self, now: float, core: SchedulerCore) -> None:
        """The incarnation is gone, with all of its blocks; the core may not know it yet."""
        worker = self.worker
        assert worker is not None
        if self.is_busy:
            self.busy_s += max(0.0, now - self.began)
        lane = core.lanes.get(self.spec.name)
        if lane is not None and lane.incarnation == self.incarnation:
            self.num_evictions += lane.pool.num_evictions
        for kind, count in worker.copied.items():
            self.copied[kind] += count
        self.present_s += now - self.present_since
        self.step += 1
        self.worker, self.is_busy = None, False
        self.inbox.clear()
        for level in (self.used, self.cached, self.slots, self.empty):
            level.set(now, 0)

    def observe(self, pool: BlockPool, block_size: int, now: float) -> None:
        """Note what its blocks are used for."""
        assert self.worker is not None
        self.used.set(now, pool.num_blocks - pool.num_available)
        self.cached.set(now, pool.num_cached)
        slots = self.worker.table_blocks * block_size
        self.slots.set(now, slots)
        self.empty.set(now, max(0, slots - self.worker.held_tokens))
