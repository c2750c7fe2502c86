"""Making one worker's next plan: who grows, who goes on with its prefill, who is preempted, who is admitted.

Preemption waits for answers. When the next plan of a worker lacks blocks while another plan is in flight, no plan is
made: its result may end requests, and blocks of a victim would be quarantined until then anyway. Only with nothing in
flight is a request preempted (`victims.py` says which); so its committed tokens are exact, its blocks are free at once,
and the plan goes out in the same tick.
"""

from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core import forks
from services.scheduler.core.lane import Lane
from services.scheduler.core.placement import Placement
from services.scheduler.core.prefix_cache import CachedBlock
from services.scheduler.core.rates import prefill_tokens_within
from services.scheduler.core.request import Request, Signal
from services.scheduler.core.seats import PlanDraft, Seat
from services.scheduler.core.victims import choose_victim
from shared.messages import EventKind, StepPlan, Tick

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore

NO_TICK = Tick(number=0, intake_id="0-0", log_id="0-0", now=0.0)
"""Stands in a plan until `ScheduledPlan.with_tick`."""
PATIENCE = 4
"""Plans per worker that may leave the first waiting request to a less loaded worker. (It may be hung.)"""


def _arrival(seat: Seat) -> int:
    return seat.request.arrival


def plan_for(core: "SchedulerCore", lane: Lane) -> StepPlan | None:
    """The lane's next plan, still without its tick; None if none is due, and then nothing has changed."""
    shortage = len(lane.boundary()) > lane.pool.num_available
    if shortage and lane.in_flight:
        return None
    while len(lane.boundary()) > lane.pool.num_available:
        preempt(core, lane)
    draft = PlanDraft(lane.planned + 1)
    lane.grow(draft)
    budget = _prefill_budget(core, lane)
    for seat in sorted(lane.prefill.values(), key=_arrival):
        if budget:
            budget = lane.prefill_chunk(draft, seat, budget)
    if not shortage:
        _admit(core, lane, draft, budget)
    if not (lane.decode or draft.chunks or (lane.has_drops and not lane.in_flight)):
        return None
    core.counters.plans += 1
    return lane.close(draft, NO_TICK)


def _prefill_budget(core: "SchedulerCore", lane: Lane) -> int:
    """Tokens that the lane's next plan may prefill. However slow its decode is, a block's worth: prompts must go on."""
    config = core.config
    room = config.max_num_batched_tokens - lane.decode
    bound = prefill_tokens_within(config.itl_target_s, lane.decode, lane.rates)
    return room if bound is None else min(room, max(config.block_size, bound))


def preempt(core: "SchedulerCore", lane: Lane) -> None:
    """Free the blocks of one request."""
    assert not lane.in_flight
    seat = choose_victim(core, lane)
    request = seat.request
    lane.drop(seat)
    request.apply(Signal.PREEMPT)
    request.num_preemptions += 1
    core.waiting.push(request)
    core.counters.preemptions += 1
    core.emit(request, EventKind.PREEMPTED, len(request.output), reason="blocks")


def _admit(core: "SchedulerCore", lane: Lane, draft: PlanDraft, budget: int) -> None:
    """Seat the waiting requests whose place is this lane, in order, while budget and rows last."""
    if not (budget and lane.free_rows and len(core.waiting)) or lane.draining:
        return
    placed, first_target = _place(core, lane, budget)
    for request, hits, source in placed:
        core.waiting.remove(request)
        core.leave_queue(request)
        request.apply(Signal.ADMIT)
        if source is None:
            seat = lane.admit(draft, request, hits)
            _count_hits(core, seat)
        else:
            seat = forks.fork(lane, draft, request, source)
            _count_fork(core, seat)
        budget = lane.prefill_chunk(draft, seat, budget)
    if first_target is lane:
        core.times_passed_over = 0
    elif first_target is not None and (lane.decode or draft.chunks):
        core.times_passed_over += 1


def _count_hits(core: "SchedulerCore", seat: Seat) -> None:
    """Note what of a newcomer is computed already, and tell readers once."""
    request = seat.request
    core.counters.cache_queries += seat.known
    core.counters.cache_hits += seat.computed
    if request.num_cached_tokens < 0:
        request.num_cached_tokens = min(seat.computed, request.num_prompt_tokens)
        if request.num_cached_tokens:
            core.newly_cached.append((request.request_id, request.num_cached_tokens))


def _count_fork(core: "SchedulerCore", seat: Seat) -> None:
    """A fork spares what its sibling computed; the cache has nothing to do with it."""
    request = seat.request
    core.counters.forks += 1
    core.counters.forked_blocks += forks.extent_of(request, core.config.block_size).num_shared
    request.num_cached_tokens = max(0, request.num_cached_tokens)


class Placed(NamedTuple):
    """A waiting request that goes to the lane, behind cached blocks or as a fork of a sibling's seat."""

    request: Request
    hits: list[CachedBlock]
    source: Seat | None


def _place(core: "SchedulerCore", lane: Lane, budget: int) -> tuple[list[Placed], Lane | None]:
    """Waiting requests that go to `lane` now, and the lane of the first one that goes anywhere."""
    placement = Placement(core.lanes.values(), core.config)
    placed: list[Placed] = []
    first_target: Lane | None = None
    entering: dict[str, None] = {}
    for request in core.waiting:
        if not placement.fits_some_lane(request):
            continue  # waits for a larger worker, in nobody's way
        siblings = core.groups.seated_siblings(request)
        source = forks.find_source(placement, request, siblings, lane)
        if source is None and forks.must_wait(request, siblings, entering):
            continue
        impatient = first_target is None and core.times_passed_over >= PATIENCE * len(core.lanes)
        target = source.lane if source else placement.place(request, preferred=lane if impatient else None)
        if target is None:
            break
        first_target = first_target or target
        entering[request.submission.group] = None
        if target is lane:
            hits = placement.hits(request, lane) if source is None else []
            placed.append(Placed(request, hits, source))
            budget -= min(budget, 1 if source else request.num_tokens - len(hits) * core.config.block_size)
            if not budget or not placement.has_row(lane):
                break
    return placed, first_target
