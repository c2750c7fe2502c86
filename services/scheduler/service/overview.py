"""What `pagewire top` shows: who runs where, who waits for what, which blocks are taken. Its cost is bounded.

requests   at most 100 that run, 100 that are swapped out and 100 that wait, whatever there are
blocks     at most 128 cells per worker and 1,024 in all; a cell is one block of the pool
"""

from collections.abc import Iterable

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.diagnostics import Diagnosis, diagnose_running, diagnose_swapped
from services.scheduler.core.lane import Lane
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import MOST_NAMED, PoolOverview, RequestOverview, WorkerOverview

MOST_REQUESTS = MOST_NAMED
CELLS_PER_WORKER = 128
CELLS_IN_ALL = 1024
FEWEST_CELLS = 8


class OverviewMaker:
    """Makes overviews at intervals; remembers what the workers had computed at the last one, for rates."""

    def __init__(self) -> None:
        self._at = 0.0
        self._computed: dict[tuple[str, int], tuple[int, int]] = {}
        """(prefilled, generated) tokens of each worker incarnation."""

    def make(self, core: SchedulerCore, waiting: list[Diagnosis], now: float) -> PoolOverview:
        """`waiting` is what `diagnose_waiting` says, `now` unix time in seconds."""
        seconds = now - self._at
        lanes = list(core.lanes.values())
        share = -(-MOST_REQUESTS // max(1, len(lanes)))
        running, swapped = diagnose_running(core, share), diagnose_swapped(core, share)
        overview = PoolOverview(
            at=now,
            workers=tuple(self._worker(lane, seconds, _num_cells(len(lanes))) for lane in lanes),
            running=_requests(core, running[:MOST_REQUESTS], now),
            waiting=_requests(core, waiting[:MOST_REQUESTS], now),
            swapped=_requests(core, swapped[:MOST_REQUESTS], now),
        )
        self._at = now
        self._computed = {(lane.worker, lane.incarnation): (lane.num_prefilled, lane.num_generated) for lane in lanes}
        return overview

    def _worker(self, lane: Lane, seconds: float, num_cells: int) -> WorkerOverview:
        computed = (lane.num_prefilled, lane.num_generated)
        before = self._computed.get((lane.worker, lane.incarnation), computed)
        per_s = 1 / seconds if seconds > 0 else 0.0
        prefilled, generated = ((now - then) * per_s for now, then in zip(computed, before, strict=True))
        return WorkerOverview(
            worker=lane.worker,
            incarnation=lane.incarnation,
            is_draining=lane.draining,
            num_running=len(lane.seats),
            num_prefilling=len(lane.prefill),
            max_running=lane.config.max_rows,
            num_plans_in_flight=len(lane.in_flight),
            num_blocks=lane.pool.num_blocks,
            num_free_blocks=lane.pool.num_free,
            num_cached_blocks=lane.pool.num_cached,
            num_quarantined_blocks=lane.pool.num_quarantined,
            prefilled_tokens_per_s=round(prefilled, 1),
            generated_tokens_per_s=round(generated, 1),
            block_map=block_map(lane.pool, num_cells),
            num_cpu_blocks=lane.pool.tier.num_blocks,
            num_free_cpu_blocks=lane.pool.tier.num_free,
            num_cached_cpu_blocks=lane.pool.tier.num_demoted,
            num_swapped=len(lane.swapped),
        )


def block_map(pool: BlockPool, num_cells: int) -> str:
    """One sign per cell; a pool of more blocks is represented by as many of them, evenly spread."""
    num_cells = min(num_cells, pool.num_blocks)
    blocks = (cell * pool.num_blocks // num_cells for cell in range(num_cells))
    return "".join("#" if pool.references(block) else "+" if block in pool.evictable else "." for block in blocks)


def _num_cells(num_workers: int) -> int:
    return max(FEWEST_CELLS, min(CELLS_PER_WORKER, CELLS_IN_ALL // max(1, num_workers)))


def _requests(core: SchedulerCore, diagnoses: Iterable[Diagnosis], now: float) -> tuple[RequestOverview, ...]:
    return tuple(
        RequestOverview(
            request_id=found.request_id,
            state=str(found.state),
            num_prompt_tokens=found.num_prompt_tokens,
            num_output_tokens=found.num_output_tokens,
            num_preemptions=found.num_preemptions,
            age_s=round(max(0.0, now - core.requests[found.request_id].submission.created), 1),
            worker=found.worker,
            row=found.row,
            reason=found.reason,
            detail=found.detail,
            num_blocks=found.num_blocks,
        )
        for found in diagnoses
    )
