"""Every message that crosses a process boundary. The rules that give them meaning are in infra/protocol.md.

The wire is MessagePack, one field `m` per stream entry. Structs are encoded as arrays `[tag, fields…]` with a tag like
`step/1`: name and major schema version. A reader ignores fields that a newer minor version appended and takes the
defaults of those that an older one lacks. Another major version raises `UnsupportedSchema`, so that the entry is left
for a peer that reads it.

codec.py             what a message is, its wire form
endings.py           why rows and requests end
request_record.py    what is stored of a request
intake.py            gateways and supervisors → scheduler
plans.py             leader → one worker incarnation
step_log.py          workers and leader → everyone
pool.py              keys with one value: leases, gauges, what people look at
"""

from shared.messages.codec import FIELD, SCHEMA_VERSION, Decoder, Message, Part, encode
from shared.messages.endings import (
    DEADLINE_CAUSES,
    FINISH_REASONS,
    WORKERS_DIED,
    EndReason,
    EventKind,
    FinishReason,
)
from shared.messages.intake import Abort, IntakeMessage, ProcessDied, Stop, Submit
from shared.messages.plans import (
    BeamRow,
    BlockCopies,
    CopyKind,
    NewRow,
    StepPlan,
    Tick,
    WorkerDraining,
    WorkerEvent,
    WorkerJoined,
)
from shared.messages.pool import (
    MOST_NAMED,
    Lease,
    PoolOverview,
    PoolStats,
    QueueTimes,
    RequestOverview,
    StepTimes,
    WorkerOverview,
    WorkerState,
)
from shared.messages.request_record import Final, Hypothesis, ResponseHead, Submission, UsageRecord
from shared.messages.step_log import Candidates, LogMessage, RequestEvent, StepResult, TickEntry, WorkerFenced

__all__ = [
    "DEADLINE_CAUSES",
    "FIELD",
    "FINISH_REASONS",
    "MOST_NAMED",
    "SCHEMA_VERSION",
    "WORKERS_DIED",
    "Abort",
    "BeamRow",
    "BlockCopies",
    "Candidates",
    "CopyKind",
    "Decoder",
    "EndReason",
    "EventKind",
    "Final",
    "FinishReason",
    "Hypothesis",
    "IntakeMessage",
    "Lease",
    "LogMessage",
    "Message",
    "NewRow",
    "Part",
    "PoolOverview",
    "PoolStats",
    "ProcessDied",
    "QueueTimes",
    "RequestEvent",
    "RequestOverview",
    "ResponseHead",
    "StepPlan",
    "StepResult",
    "StepTimes",
    "Stop",
    "Submission",
    "Submit",
    "Tick",
    "TickEntry",
    "UsageRecord",
    "WorkerDraining",
    "WorkerEvent",
    "WorkerFenced",
    "WorkerJoined",
    "WorkerOverview",
    "WorkerState",
    "encode",
]
