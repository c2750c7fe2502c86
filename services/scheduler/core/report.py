"""What the core tells of itself: figures for metrics, committed output for the records."""

from typing import TYPE_CHECKING

from services.scheduler.core import logprobs
from services.scheduler.core.outcomes import LiveOutput, SchedulerStats
from services.scheduler.core.request import Request
from shared.packing import pack_int32

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


def live_output(core: "SchedulerCore", request: Request) -> LiveOutput:
    """The committed output of one live request."""
    core.collect(request)
    seat, place = request.seat, None
    if seat is not None:
        lane = seat.lane
        if 0 < seat.first <= lane.answered:
            place = (lane.worker, lane.incarnation, seat.row, lane.answered)
    return LiveOutput(
        request_id=request.request_id,
        output=pack_int32(request.output),
        seat=place,
        num_cached_tokens=max(0, request.num_cached_tokens),
        logprobs=logprobs.packed(request, len(request.output)),
        fingerprint=request.fingerprint,
    )


def stats_of(core: "SchedulerCore") -> SchedulerStats:
    """Gauges and counters at this moment."""
    lanes, counters = core.lanes.values(), core.counters
    num_swapped = sum(len(lane.swapped) for lane in lanes)
    return SchedulerStats(
        num_running=len(core.requests) - len(core.waiting) - num_swapped,
        num_waiting=len(core.waiting),
        num_workers=len(core.lanes),
        num_blocks=sum(lane.pool.num_blocks for lane in lanes),
        num_free_blocks=sum(lane.pool.num_free for lane in lanes),
        num_cached_blocks=sum(lane.pool.num_cached for lane in lanes),
        num_preemptions=counters.preemptions,
        num_requeues=counters.requeues,
        num_handovers=counters.handovers,
        num_plans=counters.plans,
        num_ignored_messages=counters.ignored,
        prefix_cache_queries=counters.cache_queries,
        prefix_cache_hits=counters.cache_hits,
        num_forks=counters.forks,
        num_forked_blocks=counters.forked_blocks,
        left_requests=counters.left_requests,
        left_tokens=counters.left_tokens,
        num_swapped=num_swapped,
        num_cpu_blocks=sum(lane.pool.tier.num_blocks for lane in lanes),
        num_free_cpu_blocks=sum(lane.pool.tier.num_free for lane in lanes),
        num_cached_cpu_blocks=sum(lane.pool.tier.num_demoted for lane in lanes),
        num_swap_outs=counters.swap_outs,
        num_swap_ins=counters.swap_ins,
        num_demotions=counters.demotions,
        num_promotions=counters.promotions,
        num_numerics_switches=counters.numerics_switches,
        finished=tuple((str(reason), count) for reason, count in core.finished_by_reason.items()),
    )
