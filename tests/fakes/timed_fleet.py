"""Workers that take time, on a virtual clock, around a real scheduler core: for what shows only under load.

A step takes a fixed time and some for every token that it computes. Tokens have no meaning here; the content worker is
the one that checks what blocks hold.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import EndReason, StepPlan, StepResult, Submission, WorkerJoined
from shared.packing import NO_TOKEN, pack_int32

STEP_S = 0.005
TOKEN_S = 0.0001


@dataclass(slots=True)
class TimedRow:
    """Tokens that a row has still to compute, and to yield."""

    to_compute: int
    to_yield: int


@dataclass(slots=True)
class TimedWorker:
    """One worker. `row_seconds` is its load: rows in use times how long."""

    name: str
    inbox: deque[StepPlan] = field(default_factory=deque)
    rows: dict[int, TimedRow] = field(default_factory=dict)
    is_busy: bool = False
    num_computed: int = 0
    row_seconds: float = 0.0

    def duration(self) -> float:
        """Of its next step."""
        plan = self.inbox[0]
        num_decoding = sum(not row.to_compute for row in self.rows.values())
        return STEP_S + TOKEN_S * (num_decoding + sum(count for _, count in plan.chunks))

    def step(self, duration: float) -> StepResult:
        plan = self.inbox.popleft()
        for row in plan.dropped:
            self.rows.pop(row, None)
        for new in plan.added:
            num_tokens = len(new.tokens) // 4
            left = new.params.max_tokens - (num_tokens - new.num_prompt_tokens)
            self.rows[new.row] = TimedRow(num_tokens - new.num_computed_tokens, left)
        self.row_seconds += len(self.rows) * duration
        yielding = [row for row, state in self.rows.items() if not state.to_compute]
        self.num_computed += len(yielding)
        for row, num_scheduled in plan.chunks:
            self.num_computed += num_scheduled
            self.rows[row].to_compute -= num_scheduled
            if not self.rows[row].to_compute:
                yielding.append(row)
        return self._result(plan, yielding)

    def _result(self, plan: StepPlan, yielding: list[int]) -> StepResult:
        tokens = [NO_TOKEN] * (max(yielding, default=-1) + 1)
        ended = []
        for row in yielding:
            tokens[row] = 7
            self.rows[row].to_yield -= 1
            if not self.rows[row].to_yield:
                ended.append((row, int(EndReason.LENGTH)))
                del self.rows[row]
        return StepResult(self.name, 1, plan.plan_id, pack_int32(tokens), ended=tuple(ended))


class TimedFleet:
    """A core, its workers and the time."""

    def __init__(self, config: SchedulerConfig, num_workers: int, num_blocks: int) -> None:
        self.core = SchedulerCore(config)
        self.workers = {f"w{index}": TimedWorker(f"w{index}") for index in range(num_workers)}
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Submission | tuple[str, float]]] = []
        for name in self.workers:
            self.core.on_worker_joined(WorkerJoined(name, 1, num_blocks))

    def run(self, arrivals: Iterable[tuple[float, Submission]]) -> None:
        """Until everything that arrives (at these times, in seconds) has ended."""
        for at, submission in arrivals:
            heappush(self._events, (at, next(self._order), submission))
        while self._events:
            self.now, _, event = heappop(self._events)
            if isinstance(event, Submission):
                self.core.add_request(event)
            else:
                worker = self.workers[event[0]]
                worker.is_busy = False
                self.core.update_from_result(worker.step(event[1]))
            self._plan()
        assert self.core.is_idle and not self.core.broken_workers()
        self.core.check_integrity()

    def _plan(self) -> None:
        while (scheduled := self.core.schedule(self.now)) is not None:
            self.workers[scheduled.worker].inbox.append(scheduled.plan)
        self.core.take_events()
        self.core.take_finished()
        self.core.take_cached()
        for worker in self.workers.values():
            if worker.inbox and not worker.is_busy:
                duration = worker.duration()
                worker.is_busy = True
                heappush(self._events, (self.now + duration, next(self._order), (worker.name, duration)))

    def imbalance(self) -> float:
        """Largest over mean load of the workers."""
        loads = [worker.row_seconds for worker in self.workers.values()]
        return max(loads) * len(loads) / sum(loads)

    @property
    def hit_rate(self) -> float:
        stats = self.core.stats()
        return stats.prefix_cache_hits / stats.prefix_cache_queries
