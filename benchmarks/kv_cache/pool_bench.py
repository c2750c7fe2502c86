"""The real block pool without a scheduler: what a block costs under churn, and how contiguous tables stay."""

import gc
import random
import time
from dataclasses import dataclass, field

from benchmarks.report import Value
from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.evictable import Eviction
from services.scheduler.core.extents import Fit

BLOCK_SIZE = 16
FILL = 0.95
"""Share of the blocks in tables, from which nobody is admitted: a pool under load."""
MEAN_PROMPT_BLOCKS = 20
MEAN_OUTPUT_BLOCKS = 10


@dataclass(slots=True)
class Table:
    """One running request."""

    blocks: list[int]
    num_final: int
    """Blocks when it ends."""


@dataclass(slots=True)
class Cost:
    """Blocks and the seconds that they took."""

    seconds: float = 0.0
    num_blocks: int = 0

    def add(self, started: float, num_blocks: int) -> None:
        self.seconds += time.perf_counter() - started
        self.num_blocks += num_blocks

    @property
    def ns(self) -> float:
        """Per block."""
        return self.seconds / max(self.num_blocks, 1) * 1e9


@dataclass(slots=True)
class Churn:
    """Requests come, grow block by block and end, as many as fit. With `cached`, what they leave stays cached."""

    pool: BlockPool
    cached: bool
    rng: random.Random
    tables: list[Table] = field(default_factory=list)
    admit: Cost = field(default_factory=Cost)
    grow: Cost = field(default_factory=Cost)
    release: Cost = field(default_factory=Cost)
    num_ended: int = 0
    _serial: int = 0

    def step(self) -> None:
        """A decode step: one table in sixteen crosses a block boundary, some end, others come."""
        growing = [table for table in self.tables if self.rng.random() * BLOCK_SIZE < 1]
        while len(growing) > self.pool.num_available:
            self._end(growing.pop())  # as if preempted
        started = time.perf_counter()
        blocks = self.pool.allocate_each([table.blocks[-1] for table in growing])
        self.grow.add(started, len(growing))
        for table, block_id in zip(growing, blocks, strict=True):
            table.blocks.append(block_id)
        for table in growing:
            if len(table.blocks) >= table.num_final:
                self._end(table)
        self._fill()

    def _end(self, table: Table) -> None:
        self.tables.remove(table)
        self.num_ended += 1
        if self.cached:
            self._keep(table)
        started = time.perf_counter()
        self.pool.release(table.blocks)
        self.release.add(started, len(table.blocks))

    def _keep(self, table: Table) -> None:
        """As if the scheduler had cached the full blocks, each with a content of its own."""
        first, self._serial = self._serial, self._serial + len(table.blocks)
        keys = [number.to_bytes(16, "little") for number in range(first, self._serial)]
        self.pool.keep(table.blocks, keys, b"domain", keys)

    def _fill(self) -> None:
        room = self.pool.num_available - round((1 - FILL) * self.pool.num_blocks)
        while room > 0:
            size = self._draw(MEAN_PROMPT_BLOCKS)
            if size > room:
                return
            room -= size
            started = time.perf_counter()
            blocks = self.pool.allocate(size)
            self.admit.add(started, size)
            self.tables.append(Table(blocks, size + self._draw(MEAN_OUTPUT_BLOCKS)))

    def _draw(self, mean: int) -> int:
        return 1 + round(self.rng.expovariate(1 / (mean - 1)))


def run_length(tables: list[list[int]]) -> float:
    """Mean blocks of a run of neighbours within a table: what one copy moves."""
    num_runs = sum(
        sum(1 for before, block_id in zip([-2, *blocks], blocks, strict=False) if block_id != before + 1)
        for blocks in tables
    )
    return sum(map(len, tables)) / max(num_runs, 1)


def measure_pool(fit: Fit, num_blocks: int, num_ended: int, *, cached: bool) -> dict[str, Value]:
    """Until `num_ended` requests have come and gone after the pool was full for the first time."""
    pool = BlockPool(num_blocks, fit=fit, eviction=Eviction.LRU)
    churn = Churn(pool, cached, random.Random(1))
    churn._fill()
    warm = len(churn.tables) * 3
    while churn.num_ended < warm:
        churn.step()
    churn.admit, churn.grow, churn.release = Cost(), Cost(), Cost()
    lengths: list[float] = []
    gc.collect()
    while churn.num_ended < warm + num_ended:
        churn.step()
        if len(lengths) * 20 < churn.num_ended - warm:
            lengths.append(run_length([table.blocks for table in churn.tables]))
    return {
        "fit": str(fit),
        "prefix cache": "on" if cached else "off",
        "admit ns/block": churn.admit.ns,
        "grow ns/block": churn.grow.ns,
        "release ns/block": churn.release.ns,
        "blocks per run": sum(lengths) / len(lengths),
        "tables": float(len(churn.tables)),
        "free runs": float(len(pool.free.runs())),
    }
