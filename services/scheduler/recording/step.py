"""One step, from a recording: what the scheduler had been told, what its plan does, and why others wait."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.recording.format import RecordingError, TickRecord, decode_plan
from services.scheduler.recording.reader import RecordedFile
from services.scheduler.recording.verify import Step, replay_file
from shared.errors import ConfigError
from shared.messages import (
    FINISH_REASONS,
    Abort,
    CopyKind,
    EndReason,
    EventKind,
    NewRow,
    StepPlan,
    StepResult,
    Stop,
    Submit,
    WorkerFenced,
    WorkerJoined,
)
from shared.packing import NO_TOKEN, unpack_int32

MAX_WAITING = 20
"""Waiting requests that are listed."""


def explain_step(files: list[RecordedFile], which: str) -> Iterator[str]:
    """Lines for people on tick `which` (`1234`), or on a worker's step (`worker-0/17`: the last one of this number).

    Raises:
        ConfigError: `which` is neither.
        RecordingError: the recording has no such step, or is damaged.
    """
    wanted = _Wanted.parse(which)
    found: list[str] = []
    ticks = [0]
    for file in files:
        view = _View(wanted)
        for step in replay_file(file, before=view.look):
            ticks = [ticks[0] or step.record.tick.number, step.record.tick.number]
            if wanted.is_met(step.record):
                found = list(view.explain(step, file.header.now))
                if not wanted.worker:
                    break
    if not found:
        raise RecordingError(f"the recording has no step {which}; its ticks are {ticks[0]} to {ticks[-1]}")
    yield from found


@dataclass(frozen=True, slots=True)
class _Wanted:
    number: int
    worker: str = ""

    @classmethod
    def parse(cls, text: str) -> "_Wanted":
        worker, _, number = text.rpartition("/")
        if not number.isdecimal():
            raise ConfigError(f"step {text!r}: expected the number of a tick, or WORKER/STEP")
        return cls(int(number), worker)

    def is_met(self, record: TickRecord) -> bool:
        if not self.worker:
            return record.tick.number == self.number
        if record.worker != self.worker:
            return False
        plan = decode_plan(record)
        return plan is not None and plan.plan_id == self.number


@dataclass(slots=True)
class _View:
    """The core before the wanted tick."""

    wanted: _Wanted
    owners: dict[int, str] = field(default_factory=dict)
    """By row of the plan's worker."""

    def look(self, core: SchedulerCore, record: TickRecord) -> None:
        if self.wanted.is_met(record):
            lane = core.lanes.get(record.worker)
            self.owners = {} if lane is None else {row: seat.request.request_id for row, seat in lane.seats.items()}

    def explain(self, step: Step, start: float) -> Iterator[str]:
        record = step.record
        yield f"tick {record.tick.number}, {record.tick.now - start:.3f} s after the begin of {step.file.path.name}"
        yield from _told(record)
        plan = decode_plan(record)
        if plan is None:
            yield "no plan"
        else:
            yield from self._plan(step, plan)
        yield from _events(record)
        yield from _waiting(step.core)

    def _plan(self, step: Step, plan: StepPlan) -> Iterator[str]:
        lane = step.core.lanes[step.record.worker]
        chunks = dict(plan.chunks)
        num_decode = lane.in_flight[-1].num_yields - sum(self._completes(step, row) for row in chunks)
        yield (
            f"plan: step {plan.plan_id} of {step.record.worker}/{step.record.incarnation}: {num_decode} decode rows "
            f"and {sum(chunks.values())} prefill tokens, of {step.core.config.max_num_batched_tokens} at most"
        )
        given = unpack_int32(plan.blocks)
        blocks: dict[int, list[int]] = {}
        for row, block_id in zip(given[::2], given[1::2], strict=True):
            blocks.setdefault(row, []).append(block_id)
        for row in plan.dropped:
            yield f"  row {row}: {self.owners.get(row, 'its request')} is dropped"
        added = {new.row: new for new in plan.added}
        for new in plan.added:
            yield f"  row {new.row}: {_admitted(new, blocks.get(new.row, []), chunks.get(new.row, 0))}"
        for row, size in plan.chunks:
            if row not in added:
                yield f"  row {row}: {self._name(step, row)} goes on with its prefill, {size} tokens"
        for row, ids in blocks.items():
            if row not in added:
                yield f"  row {row}: {self._name(step, row)} grows by block {', '.join(map(str, ids))}"
        for copies in plan.copies:
            yield f"  copies {CopyKind(copies.kind).name}: {_pairs(copies.pairs)}"
        for beam in plan.beams:
            yield f"  row {beam.row}: beam behind row {beam.parent} with token {beam.token}"

    def _name(self, step: Step, row: int) -> str:
        seat = step.core.lanes[step.record.worker].seats.get(row)
        return seat.request.request_id if seat else self.owners.get(row, "a request that ended")

    def _completes(self, step: Step, row: int) -> bool:
        seat = step.core.lanes[step.record.worker].seats.get(row)
        return seat is not None and seat.computed == seat.known


def _admitted(new: NewRow, blocks: list[int], chunk: int) -> str:
    known, again = len(new.tokens) // 4, len(new.tokens) // 4 - new.num_prompt_tokens
    output = f" ({again} of them output)" if again else ""
    return (
        f"{new.request_id} is admitted: {known} tokens known{output}, KV of {new.num_computed_tokens} there already, "
        f"{chunk} computed now, {len(blocks)} blocks"
    )


def _pairs(packed: bytes) -> str:
    numbers = unpack_int32(packed)
    return ", ".join(f"{source}→{target}" for source, target in zip(numbers[::2], numbers[1::2], strict=True))


def _told(record: TickRecord) -> Iterator[str]:
    for entry in record.log:
        if isinstance(entry, StepResult):
            num_tokens = sum(token != NO_TOKEN for token in unpack_int32(entry.tokens))
            ends = ", ".join(f"row {row} {FINISH_REASONS[EndReason(reason)]}" for row, reason in entry.ended)
            yield f"told: step {entry.step_id} of {entry.worker}/{entry.incarnation}: {num_tokens} tokens" + (
                f"; ended: {ends}" if ends else ""
            )
        elif isinstance(entry, WorkerFenced):
            yield f"told: {entry.worker}/{entry.incarnation} is fenced ({entry.reason})"
    for message in record.intake:
        if isinstance(message, Submit):
            yield f"told: {message.request_id} is submitted"
        elif isinstance(message, Abort):
            yield f"told: abort {message.request_id} ({message.cause})"
        elif isinstance(message, Stop):
            yield f"told: {message.request_id} stops at token {message.num_output_tokens}"
    for event in record.tick.events:
        if isinstance(event, WorkerJoined):
            yield f"told: {event.worker}/{event.incarnation} joins with {event.num_blocks} blocks"
        else:
            yield f"told: {event.worker}/{event.incarnation} drains"


def _events(record: TickRecord) -> Iterator[str]:
    for event in record.events:
        verb = "is preempted" if event.kind is EventKind.PREEMPTED else "ends"
        yield f"event: {event.request_id} {verb}: {event.reason}, {event.num_output_tokens} output tokens"


def _waiting(core: SchedulerCore) -> Iterator[str]:
    """Those that wait after the tick, in their order."""
    waiting = [found for found in core.diagnostics() if found.reason]
    for found in waiting[:MAX_WAITING]:
        yield f"waits: {found.request_id} ({found.reason}): {found.detail}"
    if len(waiting) > MAX_WAITING:
        yield f"waits: {len(waiting) - MAX_WAITING} more"
