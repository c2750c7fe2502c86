"""Where two messages differ, in words."""

from typing import Any, NamedTuple

import msgspec

from services.scheduler.core.ticks import TickOutcome
from services.scheduler.recording.format import (
    RecordingError,
    TickRecord,
    decode_plan,
    ended_of,
    plan_bytes,
)
from shared.messages import StepPlan
from shared.packing import unpack_int32

MAX_SHOWN = 200
PACKED = frozenset(("blocks", "tokens", "pairs", "prompt_tokens", "output"))
"""Fields that hold packed int32."""


class Difference(NamedTuple):
    """The first one. `field` is a path such as `plan.chunks[2]`."""

    tick: int
    field: str
    recorded: str
    derived: str

    def __str__(self) -> str:
        return f"tick {self.tick}: {self.field} was {self.recorded}, is now {self.derived}"


def compare(record: TickRecord, outcome: TickOutcome) -> Difference | None:
    """Whether the tick leads to what is recorded."""
    number, planned = record.tick.number, outcome.plan
    if bytes(record.plan) != plan_bytes(outcome):
        return _of_plans(record, None if planned is None else planned.plan)
    pairs = (
        ("worker", record.worker, planned.worker if planned else ""),
        ("incarnation", record.incarnation, planned.incarnation if planned else 0),
        ("events", record.events, outcome.events),
        ("cached", record.cached, outcome.cached),
        ("ended", record.ended, tuple(ended_of(finished) for finished in outcome.finished)),
    )
    for name, recorded, derived in pairs:
        if recorded != derived:
            return Difference(number, *_first(name, recorded, derived))
    return None


def _of_plans(record: TickRecord, derived: StepPlan | None) -> Difference:
    number = record.tick.number
    try:
        recorded = decode_plan(record)
    except RecordingError as error:
        return Difference(number, "plan", str(error), _show("plan", derived))
    if recorded == derived:  # other bytes that mean the same
        return Difference(number, "plan", f"{bytes(record.plan).hex()[:MAX_SHOWN]}", "the same in other bytes")
    return Difference(number, *_first("plan", recorded, derived))


def _first(path: str, recorded: Any, derived: Any) -> tuple[str, str, str]:
    """(path, recorded, derived) of the first part that differs."""
    if type(recorded) is type(derived):
        if isinstance(recorded, msgspec.Struct):
            for name in recorded.__struct_fields__:
                one, other = getattr(recorded, name), getattr(derived, name)
                if one != other:
                    return _first(f"{path}.{name}", one, other)
        if isinstance(recorded, tuple) and len(recorded) == len(derived):
            for index, (one, other) in enumerate(zip(recorded, derived, strict=True)):
                if one != other:
                    return _first(f"{path}[{index}]", one, other)
    return path, _show(path, recorded), _show(path, derived)


def _show(path: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bytes) and path.rpartition(".")[2].partition("[")[0] in PACKED and len(value) % 4 == 0:
        text = str(list(unpack_int32(value)))
    else:
        text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
