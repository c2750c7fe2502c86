"""Every message that crosses a process boundary. The rules that give them meaning are in infra/protocol.md.

The wire is MessagePack, one field `m` per stream entry. Structs are encoded as arrays `[tag, fields…]` with a tag like
`step/1`: name and major schema version. A reader ignores fields that a newer minor version appended and takes the
defaults of those that an older one lacks. Another major version raises `UnsupportedSchema`, so that the entry is left
for a peer that reads it.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from shared.errors import MalformedMessage, UnsupportedSchema
from shared.sampling import SamplingParams

SCHEMA_VERSION = 1
FIELD = b"m"
"""The one field of every stream entry."""


def _tag(name: str) -> str:
    return f"{name}/{SCHEMA_VERSION}"


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A top-level message; its tag carries the schema version."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a message, without a version of its own."""


# ---------------------------------------------------------------- endings


class EndReason(IntEnum):
    """Why a worker ended a row (token-level endings only)."""

    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    ERROR = 4


class FinishReason(StrEnum):
    """Why a request ended, as the terminal event and the final record say it."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"
    TIMEOUT = "timeout"  # a deadline of the request


FINISH_REASONS: Mapping[EndReason, FinishReason] = {
    EndReason.EOS: FinishReason.STOP,
    EndReason.STOP_TOKEN: FinishReason.STOP,
    EndReason.LENGTH: FinishReason.LENGTH,
    EndReason.ERROR: FinishReason.ERROR,
}
"""How a request ends that a worker ended."""


DEADLINE_CAUSES = ("queue_deadline", "first_token_deadline", "deadline")
"""Causes of the aborts that end a request with TIMEOUT; in the order of `Submission.deadlines`."""


class EventKind(StrEnum):
    PREEMPTED = "preempted"
    FINISHED = "finished"


# ---------------------------------------------------------------- request record


class Submission(Message, frozen=True, tag=_tag("submission")):
    """What a gateway accepted; immutable, stored in the request record. All that E and the scheduler need."""

    request_id: str
    model: str
    kind: str
    """`chat` or `completion`: the shape of the client's output."""
    created: float
    """Unix time, seconds."""
    prompt_tokens: bytes
    """Packed int32."""
    params: SamplingParams
    stop: tuple[str, ...] = ()
    priority: int = 0
    tenant: str = ""
    traceparent: str = ""
    cache_salt: str = ""
    """Cached prefixes are shared only within tenant and salt."""
    group: str = ""
    """For one of several choices (`n`, `best_of`): the id of choice 0. All of a group have the same prompt."""
    deadlines: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds from `created` to the first admission, to the first token and to the end; 0: none."""


class ResponseHead(Message, frozen=True, tag=_tag("response")):
    """What one HTTP request consists of; stored in the record of its first request, whose id is also the response's.
    With the records it is all that a gateway needs to answer in the place of another."""

    request_ids: tuple[str, ...]
    """Prompt-major; the choices of a prompt lie side by side."""
    include_usage: bool = False
    continuous_usage: bool = False
    created: float = 0.0
    """Unix time, seconds."""
    tenant: str = ""
    num_prompt_tokens: int = 0
    window_s: float = 0.0
    """How long it goes on without a client; 0: it is given up as soon as a living gateway sees its client leave."""


class Hypothesis(Part, frozen=True):
    """One result of a beam search."""

    tokens: bytes
    """Packed int32: the whole output."""
    score: float
    """Sum of the tokens' log-probabilities over `length ** length_penalty`."""
    end_reason: int = 0
    """`EndReason` of its last token."""


class Final(Message, frozen=True, tag=_tag("final")):
    """The end of a request, stored in its record."""

    reason: FinishReason
    num_output_tokens: int
    end_reason: int = 0
    """`EndReason` of the worker if it ended the row, else 0."""
    message: str = ""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the request was first admitted."""
    cumulative_logprob: float = 0.0
    """Sum over the output tokens that count, if `params.with_logprobs`."""
    hypotheses: tuple[Hypothesis, ...] = ()
    """Of a beam search: best first. The record's output is that of the first."""


class UsageRecord(Message, frozen=True, tag=_tag("usage")):
    """What one request used, written in the commit of the tick that ended it: once, however it ended. Without text."""

    request_id: str
    """A choice of a response is a request of its own: `<id>#<k>`; further prompts are `<id>-<i>`."""
    tenant: str
    model: str
    created: float
    """Unix time, seconds; so is the next."""
    ended: float
    reason: FinishReason
    cause: str
    """Of an abort."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    """Those that count."""
    num_generated_tokens: int
    """Those that were computed."""
    group: str = ""
    """Choices with one group share the prompt: it is to be charged once."""


# ---------------------------------------------------------------- intake: gateways and supervisors → scheduler


class Submit(Message, frozen=True, tag=_tag("submit")):
    """The record of `request_id` is complete: schedule it."""

    request_id: str


class Stop(Message, frozen=True, tag=_tag("stop")):
    """A stop string completed: only `num_output_tokens` tokens count; the rest is not needed."""

    request_id: str
    num_output_tokens: int


class Abort(Message, frozen=True, tag=_tag("abort")):
    """Nobody waits for the request any more. `attach` is the attach number under which the sender held it."""

    request_id: str
    cause: str
    """`client_disconnect`, `cancelled`, `deadline`, …: a metric label."""
    attach: int = 0


class ProcessDied(Message, frozen=True, tag=_tag("died")):
    """A supervisor saw its child end: no need to wait for the lease of `instance` to lapse."""

    instance: str


IntakeMessage = Submit | Stop | Abort | ProcessDied

# ---------------------------------------------------------------- ticks


class WorkerJoined(Part, frozen=True, tag="joined"):
    """A worker incarnation was admitted with this capacity."""

    worker: str
    incarnation: int
    num_blocks: int
    num_cpu_blocks: int = 0
    """Blocks of its host pool, for swapped requests and demoted cache blocks."""
    block_bytes: int = 0
    """Bytes of one block in the KV cache; 0: unknown."""


class WorkerDraining(Part, frozen=True, tag="draining"):
    """Place nothing more on the worker."""

    worker: str
    incarnation: int


WorkerEvent = WorkerJoined | WorkerDraining


class Tick(Part, frozen=True):
    """All inputs of one turn of the scheduler core: replaying the ticks re-derives every decision."""

    number: int
    """From 1, without gaps, over all epochs."""
    intake_id: str
    """Intake is applied up to and including this entry id."""
    log_id: str
    """The step log is applied up to and including this entry id."""
    now: float
    """Unix time, seconds; never falls."""
    events: tuple[WorkerEvent, ...] = ()


# ---------------------------------------------------------------- plans: leader → one worker incarnation


class NewRow(Part, frozen=True):
    """A request that enters the worker's batch, with all of its known tokens."""

    row: int
    request_id: str
    tokens: bytes
    """Packed int32: prompt, then committed output."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in the row's blocks (prefix hit); the rest is prefilled in chunks."""
    params: SamplingParams
    traceparent: str = ""


class CopyKind(IntEnum):
    """Where a block's content is copied from and to."""

    OUT = 1
    """KV cache → host pool."""
    WITHIN = 2
    """KV cache → KV cache."""
    IN = 3
    """Host pool → KV cache."""


class BlockCopies(Part, frozen=True):
    """Blocks to copy before the forward pass."""

    kind: CopyKind
    pairs: bytes
    """Packed int32 pairs (source, destination). No source is a destination."""


class BeamRow(Part, frozen=True):
    """A beam that advances in this pass: the sequence of `parent` as it was before this plan, then `token`."""

    row: int
    parent: int
    token: int
    block: int = -1
    """If not -1: stands in the place of the last block of the parent's table; its content comes by a WITHIN copy."""


class StepPlan(Message, frozen=True, tag=_tag("plan")):
    """A delta to the worker's persistent batch, then one forward pass.

    Decode rows are not named: each yields one token.
    """

    plan_id: int
    """From 1 per worker incarnation; also the entry id `<plan_id>-0` and the step id of its result."""
    tick: Tick
    dropped: tuple[int, ...] = ()
    """Rows that leave before the pass (preempted, aborted, stopped); not those that the worker itself ended."""
    added: tuple[NewRow, ...] = ()
    blocks: bytes = b""
    """Packed int32 pairs (row, block_id), appended to the rows' block tables in this order."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(row, num_scheduled_tokens) of every row that is in prefill and scheduled in this pass."""
    traceparent: str = ""
    copies: tuple[BlockCopies, ...] = ()
    """In this order, after `dropped` and before anything is written: OUT, then WITHIN, then IN."""
    beams: tuple[BeamRow, ...] = ()
    """Beams are named whenever they advance; a beam that is not named stands still."""


# ---------------------------------------------------------------- step log: workers and leader → everyone


class Candidates(Part, frozen=True):
    """What may follow the sequence of one beam row, best first; equal ones by token."""

    row: int
    tokens: bytes
    """Packed int32; `-1 - token` if the token would end the row (EOS or stop token)."""
    logprobs: bytes
    """Packed float32: log-softmax of the row's logits."""


class StepResult(Message, frozen=True, tag=_tag("step")):
    """Every token that one forward pass produced, in columns."""

    worker: str
    incarnation: int
    step_id: int
    tokens: bytes = b""
    """Packed int32, indexed by row; NO_TOKEN where the row yielded nothing; rows past the end yielded nothing."""
    joined: tuple[tuple[int, str, int], ...] = ()
    """(row, request_id, output index of its token in this step) of rows that yield their first token since added."""
    left: tuple[int, ...] = ()
    """Joined rows that the plan dropped: they yield nothing from this step on."""
    ended: tuple[tuple[int, int], ...] = ()
    """(row, EndReason): the row's token in this step, if any, is its last, and the row is free after it."""
    roster: tuple[tuple[int, str, int], ...] = ()
    """Every 64 steps: (row, request_id, output index of the row's next token) of every joined row, after this step."""
    rates: tuple[float, ...] = ()
    """In the first step and every 64, measured: prefill tokens/s, decode tokens/s, copy bytes/s; 0: not known."""
    traceparent: str = ""
    logprobs: tuple[tuple[int, float], ...] = ()
    """(row, log-probability of its token in this step) of rows with `params.with_logprobs`."""
    candidates: tuple[Candidates, ...] = ()
    """Of every beam row that was computed: it yields these instead of a token."""


class RequestEvent(Part, frozen=True):
    """A decision of the scheduler that readers of the log must know."""

    request_id: str
    kind: EventKind
    num_output_tokens: int
    """Committed output at this point. For FINISHED: how many count."""
    reason: str = ""
    """For FINISHED a `FinishReason`; for PREEMPTED why."""
    message: str = ""


class TickEntry(Message, frozen=True, tag=_tag("tick")):
    """What a tick decided for readers of the log. `tick` is set if no plan carries it."""

    tick: Tick | None = None
    events: tuple[RequestEvent, ...] = ()
    cached: tuple[tuple[str, int], ...] = ()
    """(request_id, prompt tokens that the prefix cache held) of requests that were admitted for the first time."""


class WorkerFenced(Message, frozen=True, tag=_tag("fenced")):
    """From here on `incarnation` of `worker` cannot have published anything more."""

    worker: str
    incarnation: int
    reason: str = ""


LogMessage = StepResult | TickEntry | WorkerFenced

# ---------------------------------------------------------------- keys with one value


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class StepTimes(Part, frozen=True):
    """How long one part of a worker's turn took, over all steps of the process."""

    part: str
    counts: tuple[int, ...]
    """By `shared.histogram.STEP_TIME_BOUNDS_S`."""
    total_s: float


class Lease(Message, frozen=True, tag=_tag("lease")):
    """What a process says of itself while it lives (TTL 2 s)."""

    service: str
    """`gateway`, `scheduler` or `gpu_worker`."""
    name: str
    """Stable name of the seat, e.g. `worker-0`."""
    instance: str
    """Unique per process start (random nonce)."""
    pid: int
    state: WorkerState
    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    fingerprint: str = ""
    """Numerics: kernels, dtype, dispatch level. Tokens continue exactly on an equal one."""
    model: str = ""
    progress: float = 0.0
    """0 to 1 while loading."""
    max_num_seqs: int = 0
    """Rows that the worker warmed up for; a scheduler with more is refused by a clear error."""
    num_cpu_blocks: int = 0
    block_bytes: int = 0
    step_times: tuple[StepTimes, ...] = ()
    """Of a worker: its step profile, refreshed with every renewal."""


class QueueTimes(Part, frozen=True):
    """How long requests of one class waited from their arrival at a gateway to their first admission."""

    priority: str
    """`high` (below 0), `normal` or `low` (above 0)."""
    counts: tuple[int, ...]
    """By `shared.histogram.QUEUE_TIME_BOUNDS_S`."""
    total_s: float


class PoolStats(Message, frozen=True, tag=_tag("stats")):
    """The leader's gauges and counters, refreshed with its lease."""

    epoch: int
    tick: int
    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Unreferenced but kept for prefix hits."""
    num_preemptions: int
    num_workers: int
    num_plans: int
    num_ignored_messages: int
    """Late, doubled or unknown messages that were dropped."""
    finished: tuple[tuple[str, int], ...] = ()
    """(FinishReason, count)."""
    prefix_cache_queries: int = 0
    """Tokens that requests had at their admissions."""
    prefix_cache_hits: int = 0
    """Those of them that were cached."""
    num_requests_swapped: int = 0
    """Waiting with their KV in a worker's host pool."""
    waiting_by_reason: tuple[tuple[str, int], ...] = ()
    """(reason of `diagnostics`, waiting requests); those beyond the first 100 count as `behind`."""
    oldest_wait_s: float = 0.0
    """Since the arrival of the waiting request that came first."""
    num_cpu_blocks: int = 0
    """Of all workers' host pools."""
    num_free_cpu_blocks: int = 0
    """Those that hold nothing."""
    num_handovers: int = 0
    """Requests that left a draining worker for another one."""
    num_requeues: int = 0
    """Requests whose worker died under them."""
    num_forks: int = 0
    """Choices that began with a sibling's prompt."""
    num_forked_blocks: int = 0
    """Blocks that they shared at that time."""
    queue_times: tuple[QueueTimes, ...] = ()
    num_cached_cpu_blocks: int = 0
    """Blocks of host pools that are kept only for prefix hits."""
    num_swap_outs: int = 0
    """Blocks copied to a host pool for requests that were preempted …"""
    num_swap_ins: int = 0
    """… and such blocks whose requests came back."""
    num_demotions: int = 0
    """Evicted blocks copied to a host pool …"""
    num_promotions: int = 0
    """… and such blocks copied back on a hit."""


class WorkerOverview(Part, frozen=True):
    """One worker incarnation, for people."""

    worker: str
    incarnation: int
    is_draining: bool
    num_running: int
    """Rows in use."""
    num_prefilling: int
    max_running: int
    num_plans_in_flight: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_quarantined_blocks: int
    prefilled_tokens_per_s: float
    """Computed over the last interval; so is the next."""
    generated_tokens_per_s: float
    block_map: str
    """One sign per cell: `#` in use, `+` kept for prefix hits, `.` free. Of a large pool it shows every k-th block."""
    num_cpu_blocks: int = 0
    num_free_cpu_blocks: int = 0
    num_cached_cpu_blocks: int = 0
    num_swapped: int = 0
    """Requests whose KV lies in its host pool."""


class RequestOverview(Part, frozen=True):
    """One live request, for people. `reason` and `detail` say why it waits."""

    request_id: str
    state: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    age_s: float
    """Since its arrival at a gateway."""
    worker: str = ""
    row: int = -1
    reason: str = ""
    detail: str = ""
    num_blocks: int = 0
    """KV blocks that it holds, shared ones included."""


class PoolOverview(Message, frozen=True, tag=_tag("overview")):
    """The pool at one moment, for people (`pagewire top`); refreshed with the stats. Its size is bounded."""

    at: float
    """Unix time, seconds."""
    workers: tuple[WorkerOverview, ...] = ()
    running: tuple[RequestOverview, ...] = ()
    """At most the first 100, by arrival."""
    waiting: tuple[RequestOverview, ...] = ()
    """At most the first 100, in their order."""
    swapped: tuple[RequestOverview, ...] = ()
    """At most 100."""


# ---------------------------------------------------------------- codec

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | Part) -> bytes:
    """The wire form of one message."""
    return _encoder.encode(message)


M = TypeVar("M", bound=Message)


class Decoder(Generic[M]):
    """Decodes one union of messages, e.g. `Decoder(IntakeMessage)`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes) -> M:
        """One message from its wire form.

        Raises:
            UnsupportedSchema: another major version.
            MalformedMessage: anything else that is not a message of the union.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            version = _foreign_version(data)
            if version is not None:
                raise UnsupportedSchema(version) from error
            raise MalformedMessage(str(error)) from error


def _foreign_version(data: bytes) -> int | None:
    """The version of a message that this code cannot read, if it is a message of another major version."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not (isinstance(fields, list) and fields and isinstance(fields[0], str)):
        return None
    version = fields[0].rpartition("/")[2]
    return int(version) if version.isdecimal() and int(version) != SCHEMA_VERSION else None
