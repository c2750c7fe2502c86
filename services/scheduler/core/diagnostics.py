"""Why does this request wait?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.admission import may_be_passed
from services.scheduler.core.forks import must_wait
from services.scheduler.core.placement import Placement, blocks_to_admit
from services.scheduler.core.request import Request, RequestState

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


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


def diagnose(core: "SchedulerCore") -> list[Diagnosis]:
    """All live requests: running ones by arrival, then waiting ones in their order."""
    running = [request for request in core.requests.values() if request.seat is not None]
    found = [_describe(core, request) for request in sorted(running, key=lambda request: request.arrival)]
    placement = Placement(core.lanes.values(), core.config)
    before = ""
    for request in core.waiting:
        reason, detail = _why(core, placement, request, before)
        found.append(_describe(core, request, reason, detail))
        lets_pass = reason in ("blocks", "rows") and may_be_passed(core, placement, request)
        if reason not in ("no_worker", "larger_worker", "sibling") and not lets_pass:
            before = before or request.request_id
    return found


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
    )


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
    needed = blocks_to_admit(request, core.config)
    parts = [f"{lane.worker} lacks {lack} ({lane.pool.num_available} blocks free)" for lane, lack in obstacles]
    passed = f"; passed by {request.num_bypassed} of at most {core.config.max_bypasses}" if request.num_bypassed else ""
    return lacking[0], f"needs a row and {needed} blocks and some room: {', '.join(parts)}{passed}"
