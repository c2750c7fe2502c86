"""Did requests enter in the order that their policy promises?"""

import itertools
from collections import Counter

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.lane import Lane
from services.scheduler.core.placement import blocks_to_admit
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import StepPlan


class AdmissionJudge:
    """Knows who arrived when and who was admitted before."""

    def __init__(self, config: SchedulerConfig, counts: Counter[str]) -> None:
        """`counts`: of `left to another worker`."""
        self.config = config
        self.counts = counts
        self.arrived: dict[str, float] = {}
        """By request: the time of the tick that brought it."""
        self.admissions: list[str] = []
        """All of them, in their order."""
        self.ran: set[str] = set()
        """Those that were admitted at least once."""
        self.bypasses: Counter[str] = Counter()
        """By request: how often one of its class that came later was admitted before it, for lack of room."""

    def judge(self, core: SchedulerCore, plan: StepPlan, worker: str, num_back: int) -> None:
        """After `core` decided on `plan`; the first `num_back` of those added return from the host."""
        if len(plan.added) > num_back:
            self._judge(core, plan, core.lanes[worker], num_back)
        self.admissions += [new.request_id for new in plan.added]
        self.ran.update(new.request_id for new in plan.added)

    def _judge(self, core: SchedulerCore, plan: StepPlan, lane: Lane, num_back: int) -> None:
        """Requests of a class go in their order, and classes in that of the policy.

        One for which another worker has room may wait for that. Else a fresh one that would fit an empty worker may be
        passed a few times; one that ran before never is.
        """
        takers = [other for other in core.lanes.values() if not other.broken and other.draining == lane.draining]
        room = max(taker.pool.num_blocks for taker in takers)
        added = [core.requests[new.request_id] for new in plan.added[num_back:]]
        order = self._order([*core.waiting, *added])
        seats = [request.seat for request in core.requests.values() if request.seat is not None]
        computing = {seat.request.submission.group for seat in seats if seat.first in (0, plan.plan_id)} - {""}
        for request in added:
            for passed in order[: order.index(request)]:
                is_able = (
                    passed.most_blocks(self.config.block_size) <= room and passed.submission.group not in computing
                )
                if lane.draining:  # it takes back only what ran before
                    is_able = is_able and passed.request_id in self.ran
                if passed in added or not is_able or not self._are_compared(passed, request):
                    continue
                if any(taker is not lane and self._has_room(taker, passed) for taker in takers):
                    self.counts["left to another worker"] += 1
                    continue
                assert passed.request_id not in self.ran, "one that ran before was passed over"
                self.bypasses[passed.request_id] += 1
                assert self.bypasses[passed.request_id] <= self.config.max_bypasses, "passed over too often"
        for one, other in itertools.pairwise(added):
            assert not self._are_compared(one, other) or order.index(one) < order.index(other), "out of order"

    def _has_room(self, lane: Lane, request: Request) -> bool:
        """Whether it could go there, if nobody went before it. (A fork needs a row, and hardly a block.)"""
        if lane.swapped or len(lane.free_rows) < request.num_rows:
            return False
        group = request.submission.group
        if group and any(seat.first and seat.request.submission.group == group for seat in lane.seats.values()):
            return True
        num_blocks = blocks_to_admit(request, self.config) - lane.pool.num_shared(lane.match(request))
        holds = lane.pool.num_blocks >= request.most_blocks(self.config.block_size)
        return holds and lane.pool.num_available - num_blocks >= self.config.room(lane.num_rows)

    def _order(self, waiting: list[Request]) -> list[Request]:
        """As they should go: the class whose oldest has the smallest rank, in it those that ran, then by arrival."""
        order = []
        while waiting:
            oldest = min(waiting, key=self._rank)
            peers = [peer for peer in waiting if self._class(peer) == self._class(oldest)]
            order.append(min(peers, key=lambda peer: (peer.request_id not in self.ran, peer.arrival)))
            waiting.remove(order[-1])
        return order

    def _class(self, request: Request) -> int:
        return request.submission.priority if self.config.policy is PolicyName.PRIORITY else 0

    def _rank(self, request: Request) -> tuple[float, int]:
        if self.config.policy is not PolicyName.PRIORITY:
            return 0.0, request.arrival
        ageing_s = self.config.priority_ageing_s
        return self.arrived[request.request_id] + request.submission.priority * ageing_s, request.arrival

    def _are_compared(self, one: Request, other: Request) -> bool:
        """Tenants that share fairly have no order among each other that the world could tell."""
        return self.config.policy is not PolicyName.FAIR or one.submission.tenant == other.submission.tenant
