"""Choices of one prompt (`n`, `best_of`): it is computed once and stored once on a worker, by forking.

    sibling │ p p p p │ p p p p │ p p o o │ o …     in decode; p: prompt, o: its own output
    fork    │ shared  │ shared  │ p p │             a copy of the third block, made by the plan that adds the fork

A fork computes the prompt's last token again, to sample from it. The block that holds this token is its own: copied if
there are other tokens in front of it in the block (copy-on-write: the sibling goes on in the original), else empty.
All blocks before it are in both tables.

Who may fork: a request without output whose sibling (same `Submission.group`, prompt and domain) is a decode row. If
none has room for it and a sibling is in prefill, it waits for that one, in nobody's way. It waits for nothing else: if
no lane with a sibling has room for it now, it is placed like any request, and where that is another worker the prompt
is computed there too, for others to fork. So choices of a full worker do not wait while another one is idle. The same
if every sibling has ended, waits itself or sits on a worker that takes nobody. With output (after a preemption or a
worker's death) it is an ordinary admission; cached blocks spare the rest.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.extents import NOWHERE
from services.scheduler.core.request import Request
from services.scheduler.core.residency import domain_of
from services.scheduler.core.seats import PlanDraft, Seat
from shared.messages import CopyKind

if TYPE_CHECKING:
    from services.scheduler.core.lane import Lane
    from services.scheduler.core.placement import Placement


class Groups:
    """Live requests by `Submission.group`, in their order of arrival."""

    def __init__(self) -> None:
        self._members: dict[str, list[Request]] = {}

    def add(self, request: Request) -> None:
        group = request.submission.group
        if group:
            self._members.setdefault(group, []).append(request)

    def remove(self, request: Request) -> None:
        members = self._members.get(request.submission.group)
        if members is not None:
            members.remove(request)
            if not members:
                del self._members[request.submission.group]

    def seated_siblings(self, request: Request) -> list[Seat]:
        """Seats that hold, or will hold, what a waiting request would compute; none if it has output already."""
        if not _may_fork(request):
            return []
        members = self._members.get(request.submission.group, ())
        return [other.seat for other in members if other.seat is not None and _is_sibling(request, other)]


def _may_fork(request: Request) -> bool:
    submission = request.submission
    is_plain_choice = bool(submission.group) and not submission.params.beam_width
    return is_plain_choice and not request.output and request.num_prompt_tokens > 1


def _is_sibling(request: Request, other: Request) -> bool:
    """Nobody's blocks are shared because a record names his group."""
    alike = other.submission.prompt_tokens == request.submission.prompt_tokens
    return alike and domain_of(other) == domain_of(request) and not other.submission.params.beam_width


def must_wait(request: Request, siblings: Collection[Seat], placed_groups: Collection[str]) -> bool:
    """Whether a request that cannot fork now waits for a sibling's prefill. `placed_groups` enter with this trial."""
    if _may_fork(request) and request.submission.group in placed_groups:
        return True
    return any(not seat.first and _takes_requests(seat.lane) for seat in siblings)


def _takes_requests(lane: "Lane") -> bool:
    return not (lane.draining or lane.broken)


@dataclass(frozen=True, slots=True)
class Extent:
    """What of a prompt a fork shares."""

    num_shared: int
    """Full blocks in front of the one that holds the prompt's last token."""
    num_copied: int
    """Tokens in front of it in that block."""


def extent_of(request: Request, block_size: int) -> Extent:
    return Extent(*divmod(request.num_prompt_tokens - 1, block_size))


def find_source(
    placement: "Placement", request: Request, siblings: Collection[Seat], lane: "Lane | None"
) -> Seat | None:
    """A sibling from whose seat the request forks, on `lane` if one is there; its lane has reserved the room."""
    ready = [seat for seat in siblings if seat.first]
    here = [seat for seat in ready if seat.lane is lane]
    for seat in here[:1] or ready:
        if placement.reserve_fork(seat.lane, request):
            return seat
    return None


def fork(lane: "Lane", draft: PlanDraft, request: Request, source: Seat) -> Seat:
    """Put `request` on a row of the source's lane, with a table that begins like the source's."""
    shared = extent_of(request, lane.config.block_size)
    blocks = source.blocks[: shared.num_shared]
    lane.pool.share(blocks)
    own = lane.pool.allocate(1, blocks[-1] if blocks else NOWHERE)
    if shared.num_copied:
        lane.pool.copies.add(CopyKind.WITHIN, source.blocks[shared.num_shared : shared.num_shared + 1], own)
    request.block_keys = request.block_keys or source.request.block_keys[: shared.num_shared]
    return lane.put(draft, request, blocks + own, num_computed=request.num_prompt_tokens - 1)
