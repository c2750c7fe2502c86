"""Requests that must have come somewhere by a time: who has not is aborted, by a message in intake like a client's.

The core knows nothing of it, and replay sees an abort where it came.
"""

from collections.abc import Iterable
from enum import IntEnum
from heapq import heapify, heappop, heappush

from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import DEADLINE_CAUSES, Abort, Submission

SLACK = 1000
"""Deadlines of ended requests that are kept, besides as many as there are of live ones: most end long before theirs."""


class Deadline(IntEnum):
    """In the order of `Submission.deadlines` and `DEADLINE_CAUSES`."""

    QUEUE = 0
    FIRST_TOKEN = 1
    TOTAL = 2


class Deadlines:
    """What is due when. Times are Unix time, counted from a request's arrival at its gateway."""

    def __init__(self, submissions: Iterable[Submission] = ()) -> None:
        self._due: list[tuple[float, str, Deadline]] = []
        self.add(submissions)

    def add(self, submissions: Iterable[Submission]) -> None:
        """Watch these requests, as far as they have deadlines."""
        for submission in submissions:
            for kind, seconds in zip(Deadline, submission.deadlines, strict=False):
                if seconds > 0:
                    heappush(self._due, (submission.created + seconds, submission.request_id, kind))

    def forget_ended(self, core: SchedulerCore) -> None:
        """Drop what is due of requests that have ended, if it has become much. All added ones must be in the core."""
        if len(self._due) > 2 * len(Deadline) * len(core.requests) + SLACK:
            self._due = [due for due in self._due if due[1] in core.requests]
            heapify(self._due)

    def next_at(self) -> float:
        """When the next one is due; never: infinity."""
        return self._due[0][0] if self._due else float("inf")

    def take(self, core: SchedulerCore, now: float) -> list[Abort]:
        """The aborts of those that are late, each once."""
        aborts = []
        while self._due and self._due[0][0] <= now:
            _, request_id, kind = heappop(self._due)
            request = core.requests.get(request_id)
            if request is not None and _is_missed(core, request, kind):
                aborts.append(Abort(request_id, DEADLINE_CAUSES[kind]))
        return aborts

    def put_back(self, aborts: Iterable[Abort], now: float) -> None:
        """They could not be sent: once more at the next look."""
        for abort in aborts:
            heappush(self._due, (now, abort.request_id, Deadline(DEADLINE_CAUSES.index(abort.cause))))


def _is_missed(core: SchedulerCore, request: Request, kind: Deadline) -> bool:
    if kind is Deadline.QUEUE:
        return not request.has_left_queue
    return kind is Deadline.TOTAL or core.num_committed(request) == 0
