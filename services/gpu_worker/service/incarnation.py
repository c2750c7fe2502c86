"""One incarnation: plans in, steps, results out.

plan-reader thread ──plans──▶ Inbox ──▶ compute (this thread) ──results──▶ publisher thread
                                ▲                                               │
                                └───────────────── fenced ──────────────────────┘
"""

import logging
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from hashlib import blake2b
from typing import Protocol

import redis

from services.gpu_worker.profile import Part, StepProfile
from services.gpu_worker.service.inbox import Inbox, PlanEntry
from services.gpu_worker.service.plan_reader import PlanReader, last_plan_in_stream
from services.gpu_worker.service.publisher import Publisher
from services.gpu_worker.service.roster import BatchRoster
from services.gpu_worker.service.seat import Seat
from shared.fault_points import FaultPoint, pass_point
from shared.messages import StepPlan, StepResult
from shared.redis_client import RedisFailure, connect, open_channel

log = logging.getLogger(__name__)

_IDLE_S = 0.1
"""An idle worker looks this often whether it should drain."""
_FLUSH_S = 2.0
"""Longest wait for results that are computed but not yet published, when an incarnation ends."""
STUCK_S = 10.0
"""A step that runs on for so long after its incarnation was fenced will never end: the process is of no use."""


class StepEngine(Protocol):
    """What computes. Calls come from one thread."""

    @property
    def profile(self) -> StepProfile:
        """Where its time goes."""

    def begin(self, worker: str, incarnation: int) -> None:
        """An incarnation starts, with an empty batch."""

    def step(self, plan: StepPlan) -> StepResult:
        """Carry out the next plan."""


class IncarnationFailed(Exception):
    """A lane of the incarnation raised `cause`. The text holds ids only, never a prompt."""

    def __init__(self, cause: Exception, seat: Seat, entry: PlanEntry | None, request_ids: tuple[str, ...]) -> None:
        step = entry.plan.plan_id if entry is not None else 0
        digest = blake2b(entry.payload, digest_size=8).hexdigest() if entry is not None else "-"
        super().__init__(
            f"worker={seat.worker} incarnation={seat.incarnation} step={step} plan_digest={digest} "
            f"requests={','.join(request_ids) or '-'}"
        )
        self.cause = cause
        self.step = step
        """The last step that was begun."""
        self.request_ids = request_ids


class Ending(StrEnum):
    """Why an incarnation was over."""

    FENCED = "fenced"
    DRAINED = "drained"
    """The leader let it go, or nobody leads, or its time was up."""


class Incarnation:
    """Serves `seat` until it is fenced.

    Once `draining` is set the leader moves its requests elsewhere, or lets them end here, and fences it when nothing is
    left; that takes `drain_grace_s` at most.
    """

    def __init__(
        self,
        engine: StepEngine,
        url: str,
        seat: Seat,
        *,
        draining: threading.Event,
        drain_grace_s: float,
        on_stuck: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_stuck`: called by another thread if a step does not end although the incarnation is over."""
        self._engine = engine
        self._seat = seat
        self._draining = draining
        self._drain_grace_s = drain_grace_s
        self._drain_until: float | None = None
        self._client: redis.Redis = connect(url)
        self._inbox = Inbox(self._watch)
        self._on_stuck = on_stuck
        self._is_over = threading.Event()
        self._publisher = Publisher(open_channel(url), seat, self._inbox, engine.profile)
        self._reader = PlanReader(url, seat, self._inbox, published=lambda: self._publisher.published)
        self._roster = BatchRoster()
        self._entry: PlanEntry | None = None
        self._executed = 0

    def serve(self) -> Ending:
        """Execute plans until the end.

        Raises:
            IncarnationFailed: the engine refused a plan or broke, or the plan stream has a gap or an entry that is no
                plan.
        """
        self._engine.begin(self._seat.worker, self._seat.incarnation)
        self._publisher.start()
        self._reader.start()
        try:
            return self._execute()
        except Exception as error:
            raise IncarnationFailed(error, self._seat, self._entry, self._roster.request_ids) from error
        finally:
            self._is_over.set()
            self._reader.stop()
            self._publisher.finish(_FLUSH_S)
            self._client.close()
            log.info("incarnation %d ends after step %d", self._seat.incarnation, self._executed)

    def _watch(self) -> None:
        """It was fenced: whatever runs must come to an end."""
        threading.Thread(target=self._end_or_report, name="stuck-watch", daemon=True).start()

    def _end_or_report(self) -> None:
        if not self._is_over.wait(STUCK_S):
            step = self._executed + 1
            log.critical("incarnation %d was fenced, and its step %d does not end", self._seat.incarnation, step)
            self._on_stuck()

    def _execute(self) -> Ending:
        idle_since = time.perf_counter()
        while not self._inbox.is_fenced:
            if self._draining.is_set() and self._may_go():
                return Ending.DRAINED
            entry = self._inbox.get(_IDLE_S)
            if entry is None:
                continue
            if len(self._roster):  # without rows nobody waits
                self._engine.profile.observe(Part.PLAN_WAIT, time.perf_counter() - idle_since)
            self._publisher.put(self._step(entry))
            idle_since = time.perf_counter()
        return Ending.FENCED

    def _step(self, entry: PlanEntry) -> StepResult:
        self._entry = entry
        self._roster.before(entry.plan)
        pass_point(FaultPoint.STEP_BEGUN, lambda: self._roster.request_ids)
        result = self._engine.step(entry.plan)
        self._roster.after(result)
        self._executed = entry.plan.plan_id
        return result

    def _may_go(self) -> bool:
        """Whether the leader has fenced it, nobody is there to do so, or the grace is over."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._drain_grace_s
        if time.monotonic() >= self._drain_until:
            log.warning("incarnation %d: the grace is over; what is left continues elsewhere", self._seat.incarnation)
            return True
        if not self._inbox.is_empty:
            return False
        try:
            return not self._seat.is_held(self._client, published=self._publisher.published) or self._is_orphaned()
        except RedisFailure:
            return False

    def _is_orphaned(self) -> bool:
        """Whether nobody leads and every plan is executed: the whole pool is being stopped."""
        if self._client.exists(self._seat.keys.leader_lease):
            return False
        return last_plan_in_stream(self._client, self._seat) <= self._executed
