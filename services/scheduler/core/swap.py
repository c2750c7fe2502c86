"""Preemption by swap: a victim's blocks go to the host pool in the plan that takes them away, and come back later.

    plan k      dropped: its row   copies OUT: block ─▶ slot    its blocks go to others, who write after the copy
    plan > k    added: a new row   copies IN: slot ─▶ block     chunk: what is known and not computed, mostly a token

A victim is taken with nothing in flight, so what is written is known, and all of it is copied, the last, partial block
too. Swapped requests go before waiting ones on their lane: as long as one of them does not fit, nobody is admitted. But
a swap must not turn the policy around: for a class that goes before theirs (a better priority, a tenant that was served
less) they give their copies up and wait like the others, as if they had been preempted by recompute.
"""

from itertools import takewhile
from typing import TYPE_CHECKING

from services.scheduler.core.admission import would_enter
from services.scheduler.core.cost_model import Preemption, swap_is_cheaper
from services.scheduler.core.cpu_tier import SwappedOut
from services.scheduler.core.lane import Lane
from services.scheduler.core.placement import blocks_to_admit
from services.scheduler.core.prefill_budget import PrefillBudget
from services.scheduler.core.prefix_cache import CachedBlock
from services.scheduler.core.request import Request, Signal
from services.scheduler.core.seats import PlanDraft, Seat

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


def copy_out(core: "SchedulerCore", lane: Lane, seat: Seat) -> SwappedOut | None:
    """Have what the victim wrote copied to the host, if that is the way and there is room. It still has its seat."""
    if lane.draining or seat.beams is not None:
        return None  # it begins again: on a worker that stays, or with its prompt
    num_computed = lane.num_written(seat)
    blocks = seat.blocks[: lane.config.blocks_for(num_computed)]
    if not _is_chosen(lane, seat, num_computed, len(blocks)):
        return None
    slots = lane.pool.tier.pin(blocks)
    if slots is None:
        return None
    core.counters.swap_outs += len(slots)
    return SwappedOut(lane, slots, num_computed)


def _is_chosen(lane: Lane, seat: Seat, num_computed: int, num_blocks: int) -> bool:
    """Whether swap is how this victim goes. What other tables hold too would not be computed again."""
    if lane.config.preemption is not Preemption.AUTO:
        return lane.config.preemption is Preemption.SWAP
    kept = seat.blocks[: seat.num_kept]
    num_kept = sum(1 for _ in takewhile(lambda block_id: lane.pool.references(block_id) > 1, kept))
    num_shared = num_kept * lane.config.block_size
    return swap_is_cheaper(
        num_tokens=num_computed - num_shared,
        num_before=num_shared,
        num_blocks=num_blocks,
        block_bytes=lane.block_bytes,
        rates=lane.rates,
    )


def leave(request: Request, swapped: SwappedOut) -> None:
    """The request has left its row, and its blocks are on the way to the host."""
    request.apply(Signal.SWAP_OUT)
    request.swapped = swapped
    swapped.lane.swapped[request.request_id] = request


def come_back(core: "SchedulerCore", lane: Lane, draft: PlanDraft, budget: PrefillBudget) -> None:
    """Seat swapped requests again, in the policy's order, while they fit and budget lasts."""
    for request in sorted(lane.swapped.values(), key=core.policy.precedence):
        hits = _hits(lane, request)
        if not (budget.of(request) and lane.free_rows and _fits(lane, request, hits)):
            break
        swapped = _forget(request)
        request.apply(Signal.SWAP_IN)
        seat = lane.seat_again(draft, request, hits, swapped)
        core.counters.swap_ins += len(swapped.slots)
        lane.prefill_chunk(draft, seat, budget)


def _hits(lane: Lane, request: Request) -> list[CachedBlock]:
    """What it finds in the KV cache still; demoted blocks are no gain, it has its own copies."""
    return list(takewhile(lambda entry: not entry.is_demoted, lane.match(request)))


def _fits(lane: Lane, request: Request, hits: list[CachedBlock]) -> bool:
    num_blocks = blocks_to_admit(request, lane.config) - lane.pool.num_shared(hits)
    return lane.pool.num_available - num_blocks >= lane.config.room(len(lane.seats))


def give_way(core: "SchedulerCore", lane: Lane, budget: PrefillBudget) -> None:
    """Swapped requests that do not fit give their copies up to one that goes before them all, and has a seat for it."""
    if all_give_way(core, lane) and would_enter(core, lane, budget):
        lose_copies(core, lane)


def all_give_way(core: "SchedulerCore", lane: Lane) -> bool:
    """Whether the next request in order goes before all that the lane has swapped out."""
    first = core.waiting.first()
    return first is not None and all(_goes_before(core, first, request) for request in lane.swapped.values())


def _goes_before(core: "SchedulerCore", first: Request, swapped: Request) -> bool:
    """Whether the policy wants it so. Within a class, what ran before goes first."""
    policy = core.policy
    if policy.class_of(first) == policy.class_of(swapped):
        return False
    return policy.precedence(first)[0] < policy.precedence(swapped)[0]


def drop_copy(request: Request) -> None:
    """The request ends, or begins again elsewhere."""
    swapped = _forget(request)
    swapped.lane.pool.tier.unpin(swapped.slots)


def _forget(request: Request) -> SwappedOut:
    swapped = request.swapped
    assert swapped is not None
    del swapped.lane.swapped[request.request_id]
    request.swapped = None
    return swapped


def lose_copies(core: "SchedulerCore", lane: Lane) -> None:
    """The lane's swapped requests wait again."""
    for request in list(lane.swapped.values()):
        _begin_again(core, request)


def leave_draining_lanes(core: "SchedulerCore") -> None:
    """Swapped requests of workers that drain go to others that can hold them."""
    others = [lane for lane in core.lanes.values() if not (lane.draining or lane.broken)]
    most = max((lane.pool.num_blocks for lane in others), default=0) * core.config.block_size
    for lane in core.lanes.values():
        for request in list(lane.swapped.values()) if lane.draining else ():
            if request.max_total_tokens <= most:
                _begin_again(core, request)


def _begin_again(core: "SchedulerCore", request: Request) -> None:
    drop_copy(request)
    request.apply(Signal.REQUEUE)
    core.waiting.push(request)
    core.counters.requeues += 1
