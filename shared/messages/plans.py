"""Plans: leader → one worker incarnation, and the tick that each carries."""

from enum import IntEnum

from shared.messages.codec import Message, Part, tag
from shared.sampling import SamplingParams


class WorkerJoined(Part, frozen=True, tag="joined"):
    """A worker incarnation was admitted with this capacity."""

    worker: str
    incarnation: int
    num_blocks: int
    num_cpu_blocks: int = 0
    """Blocks of its host pool, for swapped requests and demoted cache blocks."""
    block_bytes: int = 0
    """Bytes of one block in the KV cache; 0: unknown."""
    fingerprint: str = ""
    """Numerics, as in its `Lease`."""


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


class StepPlan(Message, frozen=True, tag=tag("plan")):
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
