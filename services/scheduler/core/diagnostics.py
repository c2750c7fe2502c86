"""Why does this request wait?"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from services.scheduler.core.admission import MAX_PASSED, may_be_passed
from services.scheduler.core.forks import must_wait
from services.scheduler.core.placement import Placement, blocks_to_admit
from services.scheduler.core.request import Request, RequestState

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


_LACKS = {
    "rows": "lacks rows",
    "blocks": "lacks blocks",
    "swapped": "has swapped requests to take back",
    "suspect": "tries a request of which workers may have died",
    "": "has room",
}


_BEHIND = {
    "suspect": "a request of which workers may have died is tried first",
    "swapped": "requests that were swapped out go first",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One live request. `reason` is a metric label (empty while it runs), `detail` is for people."""

    request_id: str
    state: RequestState
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    worker: str = ""
    row: int = -1
    reason: str = ""
    detail: str = ""
    num_blocks: int = 0
    """KV blocks that it holds, in its worker or, swapped out, in the host pool; shared ones included."""


def diagnose(core: "SchedulerCore") -> list[Diagnosis]:
    """All live requests: running ones by arrival, then swapped ones, then waiting ones in their order."""
    most = len(core.requests)
    return diagnose_running(core, most) + diagnose_swapped(core, most) + diagnose_waiting(core, most)


def diagnose_running(core: "SchedulerCore", most_per_worker: int) -> list[Diagnosis]:
    """Running requests, at most so many of each worker, by arrival."""
    running = [seat.request for lane in core.lanes.values() for seat in islice(lane.seats.values(), most_per_worker)]
    return [_describe(core, request) for request in sorted(running, key=lambda request: request.arrival)]


def diagnose_swapped(core: "SchedulerCore", most_per_worker: int) -> list[Diagnosis]:
    """Requests whose KV lies in a host pool, at most so many of each worker, in the policy's order."""
    swapped = [request for lane in core.lanes.values() for request in islice(lane.swapped.values(), most_per_worker)]
    return [_describe_swapped(core, request) for request in sorted(swapped, key=core.policy.precedence)]


def diagnose_waiting(core: "SchedulerCore", most: int) -> list[Diagnosis]:
    """The first `most` waiting requests in their order."""
    found: list[Diagnosis] = []
    placement = Placement(core.lanes.values(), core.config)
    before = ""
    num_passed = 0
    for request in islice(core.waiting, most):
        reason, detail = _why(core, placement, request, before)
        found.append(_describe(core, request, reason, detail))
        is_short = reason in ("blocks", "rows") and num_passed < MAX_PASSED
        lets_pass = is_short and may_be_passed(core, placement, request)
        num_passed += lets_pass
        if reason not in ("no_worker", "larger_worker", "sibling") and not lets_pass:
            before = before or request.request_id
    return found


def count_by_reason(waiting: list[Diagnosis], num_waiting: int) -> list[tuple[str, int]]:
    """(reason, requests) of all that wait; those that `waiting` leaves out stand behind it."""
    counts = Counter(diagnosis.reason for diagnosis in waiting)
    counts["behind"] += num_waiting - len(waiting)
    return sorted((reason, count) for reason, count in counts.items() if count)


def _describe(core: "SchedulerCore", request: Request, reason: str = "", detail: str = "") -> Diagnosis:
    seat = request.seat
    return Diagnosis(
        request_id=request.request_id,
        state=request.state,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=core.num_committed(request),
        num_preemptions=request.num_preemptions,
        worker=seat.lane.worker if seat else "",
        row=seat.row if seat else -1,
        reason=reason,
        detail=detail,
        num_blocks=len(seat.blocks) if seat else 0,
    )


def _describe_swapped(core: "SchedulerCore", request: Request) -> Diagnosis:
    assert request.swapped is not None
    lane, needed = request.swapped.lane, blocks_to_admit(request, core.config)
    detail = f"its KV lies in the host memory of {lane.worker}; it needs a row and {needed} blocks there"
    found = _describe(core, request, "swapped", detail)
    return replace(found, worker=lane.worker, num_blocks=len(request.swapped.slots))


def _why(core: "SchedulerCore", placement: Placement, request: Request, before: str) -> tuple[str, str]:
    """(reason, detail). `before` is the first request that none behind it may pass, if there is one before this."""
    if not core.lanes:
        return "no_worker", "no worker has joined"
    if placement.all_leave and not request.has_begun:
        return "no_worker", "every worker is leaving"
    if not placement.fits_some_lane(request):
        return "larger_worker", f"no worker that takes requests holds {request.max_total_tokens} tokens"
    if must_wait(request, core.groups.seated_siblings(request), ()):
        return "sibling", f"another choice of {request.submission.group} is computing their prompt"
    if before:
        return "behind", f"{before} goes first"
    obstacles = placement.obstacles(request)
    lacking = sorted({obstacle for _, obstacle in obstacles if obstacle})
    if len([obstacle for _, obstacle in obstacles if obstacle]) < len(obstacles):
        return "next_plan", "a worker takes it with its next plan"
    if set(lacking) <= _BEHIND.keys():
        return "behind", " or ".join(_BEHIND[lack] for lack in lacking)
    needed = blocks_to_admit(request, core.config)
    parts = [f"{lane.worker} {_LACKS[lack]} ({lane.pool.num_available} blocks free)" for lane, lack in obstacles]
    passed = f"; passed by {request.num_bypassed} of at most {core.config.max_bypasses}" if request.num_bypassed else ""
    lacking = [lack for lack in lacking if lack not in ("swapped", "suspect")]
    return lacking[0], f"needs a row and {needed} blocks and some room: {', '.join(parts)}{passed}"
