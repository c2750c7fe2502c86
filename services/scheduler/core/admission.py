"""Giving waiting requests a seat, in the policy's order.

The order has one exception. A fresh request that lacks blocks while rows are free lets later ones pass that fit, so
that one large prompt does not idle a worker: at most `max_bypasses` times, after which nobody passes until it is
admitted, and it keeps its place all the while. A request that ran before is never passed: the blocks it lacks are those
that it gave up.
"""

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core import draining, forks
from services.scheduler.core.lane import Lane
from services.scheduler.core.placement import Placement
from services.scheduler.core.prefill_budget import PrefillBudget
from services.scheduler.core.prefix_cache import CachedBlock
from services.scheduler.core.request import Request, Signal
from services.scheduler.core.seats import PlanDraft, Seat
from services.scheduler.core.suspects import is_suspect

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore

PATIENCE = 4
"""Plans per worker that may leave the first waiting request to a less loaded worker. (It may be hung.)"""
MAX_PASSED = 8
"""Requests that may lack blocks before a plan looks no further; each costs about as much as an admission."""


class Placed(NamedTuple):
    """A request that goes to a lane now."""

    request: Request
    hits: list[CachedBlock]
    source: Seat | None
    """The sibling's seat from which it forks."""
    num_passed: int
    """Of `Admissions.passed`, those that it passes."""


class Admissions(NamedTuple):
    """Who would be admitted on one lane, and at whose cost."""

    placed: list[Placed]
    passed: list[Request]
    """They lack blocks, in order."""
    first_target: Lane | None
    """Where the first request goes that goes anywhere."""
    targets: dict[int, None]
    """Index of each lane to which some request goes that was looked at."""


def admit(
    core: "SchedulerCore", lane: Lane, draft: PlanDraft, budget: PrefillBudget, *, limit: int | None = None
) -> None:
    """Seat the waiting requests whose place is this lane, in order, while budget and rows last.

    `limit` bounds how many requests are looked at.
    """
    is_full = lane.pool.num_available <= core.config.room(lane.num_rows)
    if is_full or not (budget.room and lane.free_rows and len(core.waiting)):
        return
    trial = _place(core, lane, budget.copy(), limit)
    for request, hits, source, num_passed in trial.placed:
        if not budget.of(request):
            break  # somebody before computes more than was reckoned, because hits were evicted for this very plan
        core.waiting.remove(request)
        is_fresh = not request.has_begun
        core.leave_queue(request)
        request.apply(Signal.ADMIT)
        request.num_bypassed = 0
        for passed in trial.passed[:num_passed]:
            passed.num_bypassed += 1
        if source is None:
            seat = lane.admit(draft, request, hits)
            _count_hits(core, seat)
        else:
            seat = forks.fork(lane, draft, request, source)
            _count_fork(core, seat)
        _note_numerics(core, seat)
        if is_fresh:
            core.newly_admitted.append((request.submission.priority, max(0.0, core.now - request.submission.created)))
            core.policy.on_admitted(request, seat.known - seat.computed)
        lane.prefill_chunk(draft, seat, budget)
    if trial.first_target is lane:
        core.times_passed_over = 0
    elif trial.first_target is not None and (lane.clock.num_rows or draft.chunks):
        core.times_passed_over += 1


def would_enter(core: "SchedulerCore", lane: Lane, budget: PrefillBudget) -> bool:
    """Whether the next request in order would have a seat in this plan, if those swapped out gave their copies up."""
    return bool(_place(core, lane, budget.copy(), limit=1, without_copies=lane).placed)


def _count_hits(core: "SchedulerCore", seat: Seat) -> None:
    """Note what of a newcomer is computed already, and tell readers once."""
    request = seat.request
    core.counters.cache_queries += seat.known
    core.counters.cache_hits += seat.computed
    if request.num_cached_tokens < 0:
        request.num_cached_tokens = min(seat.computed, request.num_prompt_tokens)
        if request.num_cached_tokens:
            core.newly_cached.append((request.request_id, request.num_cached_tokens))


def _note_numerics(core: "SchedulerCore", seat: Seat) -> None:
    """Unequal workers may continue a text differently. Delivered tokens never change, but that is said."""
    request, fingerprint = seat.request, seat.lane.fingerprint
    if request.output and request.fingerprint and fingerprint not in ("", request.fingerprint):
        request.num_numerics_switches += 1
        core.counters.numerics_switches += 1
    request.fingerprint = fingerprint or request.fingerprint


def _count_fork(core: "SchedulerCore", seat: Seat) -> None:
    """A fork spares what its sibling computed; the cache has nothing to do with it."""
    request = seat.request
    core.counters.forks += 1
    core.counters.forked_blocks += forks.extent_of(request, core.config.block_size).num_shared
    request.num_cached_tokens = max(0, request.num_cached_tokens)


class EmptyLanes:
    """Which of the lanes on which nobody runs have a next plan: those to which somebody goes.

    One look at the queue answers for all but the first that is asked for, as long as nothing changes: up to its first
    newcomer, an empty lane makes no difference to where requests go.
    """

    def __init__(self, core: "SchedulerCore") -> None:
        self._core = core
        self._num_asked = 0
        self._targets: dict[int, None] = {}

    def may_have_plan(self, lane: Lane) -> bool:
        """Whether `lane`, which is empty, may be some request's place."""
        core = self._core
        if not len(core.waiting):
            return False
        self._num_asked += 1
        if self._num_asked == 1 or core.times_passed_over >= PATIENCE * len(core.lanes):
            return True  # to try is no more work; and who waited for long goes wherever he can
        if self._num_asked == 2:
            most = core.config.max_num_batched_tokens
            self._targets = _place(core, None, PrefillBudget(most, most), None).targets
        return lane.index in self._targets


def _place(
    core: "SchedulerCore",
    lane: Lane | None,
    budget: PrefillBudget,
    limit: int | None,
    *,
    without_copies: Lane | None = None,
) -> Admissions:
    """Waiting requests that go to `lane` now; without a lane, only where they would go. Spends the budget, and changes
    nothing else."""
    placement = Placement(core.lanes.values(), core.config, without_copies=without_copies)
    placed: list[Placed] = []
    passed: list[Request] = []
    first_target: Lane | None = None
    most = core.config.max_bypasses
    """Requests that may still be placed."""
    entering: dict[str, None] = {}
    may_reserve = True
    targets: dict[int, None] = {}
    if lane is not None and not placement.concerns(lane):
        return Admissions([], [], None, targets)
    for request in islice(core.waiting, limit):
        if not budget.of(request) or (placed and is_suspect(request, core.config)):
            break  # nobody enters together with a suspect
        if may_reserve and not request.has_begun:
            draining.reserve(core, placement)
            may_reserve = False
        if not placement.fits_some_lane(request):
            continue  # waits for a larger worker, in nobody's way
        siblings = core.groups.seated_siblings(request)
        source = forks.find_source(placement, request, siblings, lane)
        if source is None and forks.must_wait(request, siblings, entering):
            continue
        impatient = first_target is None and core.times_passed_over >= PATIENCE * len(core.lanes)
        target = source.lane if source else placement.place(request, preferred=lane if impatient else None)
        if target is None:
            if not may_be_passed(core, placement, request) or len(passed) == MAX_PASSED:
                break
            room = core.config.max_bypasses - request.num_bypassed
            most = min(most, room) if passed else room
            passed.append(request)
            continue
        first_target = first_target or target
        targets[target.index] = None
        entering[request.submission.group] = None
        if target is lane:
            hits = placement.hits(request, lane) if source is None else []
            placed.append(Placed(request, hits, source, len(passed)))
            num_tokens = 1 if source else request.num_tokens - len(hits) * core.config.block_size
            budget.spend(min(budget.of(request), num_tokens))
            most -= len(passed) > 0
            if not placement.has_row(lane) or is_suspect(request, core.config):
                break
        if (passed and most <= 0) or (lane is None and len(targets) == len(core.lanes)):
            break
    return Admissions(placed, passed, first_target, targets)


def may_be_passed(core: "SchedulerCore", placement: Placement, request: Request) -> bool:
    """Whether later requests may go before this one, which goes nowhere now."""
    return placement.has_rows and not request.has_begun and request.num_bypassed < core.config.max_bypasses
