"""Making one worker's next plan: who grows, who goes on with its prefill, who is preempted. `admission.py` says who
enters.

Preemption waits for answers. When the next plan of a worker lacks blocks while another plan is in flight, no plan is
made: its result may end requests, and blocks of a victim would be quarantined until then anyway. Only with nothing in
flight is a request preempted (`victims.py` says which); so its committed tokens are exact, its blocks are free at once,
and the plan goes out in the same tick. A plan that preempts seats nobody; else those that were swapped out come first.
"""

from typing import TYPE_CHECKING

from services.scheduler.core import beam_rows, draining, swap
from services.scheduler.core.admission import admit
from services.scheduler.core.blocks import AllocStatus
from services.scheduler.core.lane import Lane
from services.scheduler.core.prefill_budget import PrefillBudget, prefill_budget
from services.scheduler.core.request import Signal
from services.scheduler.core.seats import PlanDraft, Seat
from services.scheduler.core.suspects import clear
from services.scheduler.core.victims import choose_victim, displaced
from shared.messages import EventKind, StepPlan, Tick

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore

NO_TICK = Tick(number=0, intake_id="0-0", log_id="0-0", now=0.0)
"""Stands in a plan until `ScheduledPlan.with_tick`."""


def plan_for(core: "SchedulerCore", lane: Lane) -> StepPlan | None:
    """The lane's next plan, still without its tick; None if none is due, and then nothing has changed."""
    if lane.draining and draining.pauses_to_hand_over(core, lane):
        return None
    shortage = _lacks_blocks(lane)
    making_way = [] if shortage else displaced(core, lane)
    if (shortage or making_way) and lane.in_flight:
        return None
    while _lacks_blocks(lane):
        preempt(core, choose_victim(core, lane), "blocks")
    for seat in making_way:
        preempt(core, seat, "share")
    if making_way:
        swap.lose_copies(core, lane)
    draft = PlanDraft(lane.planned + 1)
    lane.grow(draft)
    beam_rows.plan(lane, draft)
    budget = prefill_budget(core.config, lane, lane.clock.num_rows + len(draft.beams))
    running = sorted(lane.prefill.values(), key=lambda seat: core.policy.precedence(seat.request))
    if running and not (shortage or lane.swapped) and _is_claimed(core):
        admit(core, lane, draft, budget, limit=1)
    for seat in running:
        lane.prefill_chunk(draft, seat, budget)
    if not shortage:
        _seat_others(core, lane, draft, budget)
    if not _is_due(lane, draft):
        return None
    core.counters.plans += 1
    if lane.pool.copies:
        core.counters.count_moves(*lane.pool.tier.tally())
    return lane.close(draft, NO_TICK)


def _seat_others(core: "SchedulerCore", lane: Lane, draft: PlanDraft, budget: PrefillBudget) -> None:
    """Those that were swapped out, then waiting ones."""
    if lane.swapped:
        swap.come_back(core, lane, draft, budget)
    if lane.swapped and _is_due(lane, draft):  # only beside a plan: without one nothing may change
        swap.give_way(core, lane, budget)
    if not lane.swapped:
        admit(core, lane, draft, budget)


def _is_due(lane: Lane, draft: PlanDraft) -> bool:
    """Whether there is something to do."""
    return bool(lane.clock.num_rows or draft.beams or draft.chunks or (lane.has_drops and not lane.in_flight))


def _lacks_blocks(lane: Lane) -> bool:
    num_blocks = len(lane.clock.boundary()) + beam_rows.num_lacking(lane)
    return lane.pool.status(num_blocks) is not AllocStatus.OK


def _is_claimed(core: "SchedulerCore") -> bool:
    """Whether the next request in order goes before prompts that are half computed."""
    if not core.policy.has_claims:
        return False
    request = core.waiting.first()
    return request is not None and core.policy.claims_seat(request)


def preempt(core: "SchedulerCore", seat: Seat, reason: str) -> None:
    """Free the row and the blocks of one request.

    Who makes way for a waiting one is not swapped out: he would go before all that wait.
    """
    lane, request = seat.lane, seat.request
    assert not lane.in_flight
    clear(seat)
    swapped = swap.copy_out(core, lane, seat) if reason == "blocks" else None
    lane.drop(seat)
    if swapped is not None:
        swap.leave(request, swapped)
    else:
        request.apply(Signal.PREEMPT)
        core.waiting.push(request)
    request.num_preemptions += 1
    core.counters.preemptions += 1
    core.emit(request, EventKind.PREEMPTED, len(request.output), reason=reason)
