"""Following the step log: which tokens belong to which request. Pure; used by gateways, recovery and tests.

A follower looks only at the rows of the requests that it tracks. A token counts if its output index equals the number
of tokens committed so far; nothing counts after the end. When steps are missing the follower says so (`gap`): its owner
then loads the request's record, which holds the committed output and the row, and tracks the request anew.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shared.errors import MalformedMessage
from shared.messages import EndReason, EventKind, LogMessage, RequestEvent, StepResult, TickEntry, WorkerFenced
from shared.packing import NO_TOKEN, are_tokens, unpack_int32
from shared.records import UNKNOWN_STEP, Seat

_END_REASONS = frozenset(EndReason)
MOST_WORKERS = 256
"""A follower remembers no more of them, beside those that work."""


@dataclass(slots=True)
class Update:
    """News of one request from one log entry."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    num_committed: int = 0
    """Committed output tokens after this update."""
    logprobs: list[float] = field(default_factory=list)
    """Of `tokens`, if the request's results carry them."""
    end_reason: EndReason | None = None
    """A worker's token-level ending: no token follows."""
    event: RequestEvent | None = None
    gap: bool = False
    """Steps are missing: reload the record."""
    num_cached_tokens: int = 0
    """Set by the entry that tells of the request's first admission, if prompt tokens were cached."""


@dataclass(slots=True)
class _Tracked:
    committed: int
    ended: bool = False


@dataclass(slots=True)
class _Row:
    request_id: str
    next_index: int


@dataclass(slots=True)
class _Worker:
    incarnation: int
    last_step: int
    rows: dict[int, _Row] = field(default_factory=dict)


class StepLogFollower:
    """Attributes the log's tokens to tracked requests."""

    def __init__(self) -> None:
        self._tracked: dict[str, _Tracked] = {}
        self._workers: dict[str, _Worker] = {}

    def track(self, request_id: str, committed: int = 0, seat: Seat | None = None) -> None:
        """Follow a request with `committed` known output tokens. `seat`: its row, if it has joined one before."""
        self.untrack(request_id)
        self._tracked[request_id] = _Tracked(committed)
        if seat is None:
            return
        worker = self._workers.get(seat.worker)
        if worker is None:
            worker = self._workers[seat.worker] = _Worker(seat.incarnation, seat.step)
        if worker.incarnation == seat.incarnation:
            worker.rows[seat.row] = _Row(request_id, committed)

    def place_of(self, request_id: str) -> tuple[int, Seat | None]:
        """Committed tokens and row of a tracked request now: what another follower at the same entry tracks it by."""
        for name, worker in self._workers.items():
            for row, seat in worker.rows.items():
                if seat.request_id == request_id:
                    return self._tracked[request_id].committed, Seat(name, worker.incarnation, row, worker.last_step)
        return self._tracked[request_id].committed, None

    def untrack(self, request_id: str) -> None:
        """Forget a request."""
        if self._tracked.pop(request_id, None) is not None:
            for worker in self._workers.values():
                for row in [r for r, seat in worker.rows.items() if seat.request_id == request_id]:
                    del worker.rows[row]

    def apply(self, message: LogMessage) -> list[Update]:
        """Updates of the tracked requests from the next log entry.

        Raises:
            MalformedMessage: a step that no worker can mean. Nothing of it counts; its worker's next one shows a gap.
        """
        if isinstance(message, StepResult):
            _check_sound(message)
            return self._apply_step(message)
        if isinstance(message, TickEntry):
            return [*self._apply_cached(message.cached), *self._apply_events(message.events)]
        if isinstance(message, WorkerFenced):
            worker = self._workers.get(message.worker)
            if worker is not None and worker.incarnation <= message.incarnation:
                self._workers[message.worker] = _Worker(message.incarnation + 1, 0)
                self._forget_fenced()
        return []

    def _forget_fenced(self) -> None:
        """Containers get new names all the time: of workers of whom nothing came since their fence, only some stay."""
        if len(self._workers) > MOST_WORKERS:
            fenced = [name for name, worker in self._workers.items() if worker.last_step == 0]
            for name in fenced[: len(self._workers) - MOST_WORKERS]:
                del self._workers[name]

    def _apply_cached(self, cached: Iterable[tuple[str, int]]) -> Iterator[Update]:
        for request_id, num_cached_tokens in cached:
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                yield Update(request_id, num_committed=tracked.committed, num_cached_tokens=num_cached_tokens)

    def _apply_events(self, events: Iterable[RequestEvent]) -> list[Update]:
        updates = []
        for event in events:
            tracked = self._tracked.get(event.request_id)
            if tracked is None:
                continue
            if event.kind is EventKind.FINISHED:
                tracked.ended = True
            updates.append(Update(event.request_id, num_committed=tracked.committed, event=event))
        return updates

    def _apply_step(self, step: StepResult) -> list[Update]:
        worker = self._workers.get(step.worker)
        if worker is None:
            worker = self._workers[step.worker] = _Worker(step.incarnation, UNKNOWN_STEP)
        elif worker.incarnation < step.incarnation:
            worker = self._workers[step.worker] = _Worker(step.incarnation, 0)
        elif worker.incarnation > step.incarnation or step.step_id <= worker.last_step:
            return []  # late or doubled
        missed = worker.last_step != UNKNOWN_STEP and step.step_id != worker.last_step + 1
        worker.last_step = step.step_id
        if missed:
            worker.rows.clear()
            return [Update(rid, num_committed=t.committed, gap=True) for rid, t in self._tracked.items() if not t.ended]
        self._seat_rows(worker, step)
        return self._attribute(worker, step)

    def _seat_rows(self, worker: _Worker, step: StepResult) -> None:
        for row in step.left:
            worker.rows.pop(row, None)
        for row, request_id, index in step.joined:
            worker.rows.pop(row, None)
            if request_id in self._tracked:
                worker.rows[row] = _Row(request_id, index)

    def _attribute(self, worker: _Worker, step: StepResult) -> list[Update]:
        updates: dict[str, Update] = {}
        if worker.rows:
            tokens, logprobs = unpack_int32(step.tokens), dict(step.logprobs)
            for row, seat in worker.rows.items():
                if row < len(tokens) and tokens[row] != NO_TOKEN:
                    self._accept(updates, seat, tokens[row], logprobs.get(row))
        for row, reason in step.ended:
            ended = worker.rows.pop(row, None)
            if ended is not None:
                self._end(updates, ended.request_id, EndReason(reason))
        self._check_roster(updates, worker, step)
        return list(updates.values())

    def _accept(self, updates: dict[str, Update], seat: _Row, token: int, logprob: float | None) -> None:
        index, seat.next_index = seat.next_index, seat.next_index + 1
        tracked = self._tracked[seat.request_id]
        if tracked.ended or index < tracked.committed:
            return
        update = updates.setdefault(seat.request_id, Update(seat.request_id))
        if index > tracked.committed:
            update.gap = True
        else:
            update.tokens.append(token)
            if logprob is not None:
                update.logprobs.append(logprob)
            tracked.committed += 1
        update.num_committed = tracked.committed

    def _end(self, updates: dict[str, Update], request_id: str, reason: EndReason) -> None:
        tracked = self._tracked[request_id]
        if tracked.ended:
            return
        tracked.ended = True
        update = updates.setdefault(request_id, Update(request_id))
        update.num_committed = tracked.committed
        update.end_reason = reason

    def _check_roster(self, updates: dict[str, Update], worker: _Worker, step: StepResult) -> None:
        """A reader that joined late learns its rows from the roster, and whether it lacks tokens."""
        for row, request_id, next_index in step.roster:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.ended:
                continue
            worker.rows[row] = _Row(request_id, next_index)
            if next_index > tracked.committed:
                update = updates.setdefault(request_id, Update(request_id, num_committed=tracked.committed))
                update.gap = True


def _check_sound(step: StepResult) -> None:
    """What the wire type does not say: whole tokens, rows that exist, known reasons."""
    if len(step.tokens) % 4:
        raise MalformedMessage("packed tokens are cut")
    if not are_tokens(step.tokens):
        raise MalformedMessage("a negative token")
    if any(row < 0 for row, *_ in (*step.joined, *step.roster)):
        raise MalformedMessage("a negative row")
    if any(reason not in _END_REASONS for _, reason in step.ended):
        raise MalformedMessage("an unknown reason of an ending")
