"""Keys with one value: what processes say of themselves, the leader of its pool."""

from enum import StrEnum

from shared.messages.codec import Message, Part, tag


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


class Lease(Message, frozen=True, tag=tag("lease")):
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
    warning: str = ""
    """What makes the process much slower than it could be, for people; empty if nothing does."""


class QueueTimes(Part, frozen=True):
    """How long requests of one class waited from their arrival at a gateway to their first admission."""

    priority: str
    """`high` (below 0), `normal` or `low` (above 0)."""
    counts: tuple[int, ...]
    """By `shared.histogram.QUEUE_TIME_BOUNDS_S`."""
    total_s: float


class PoolStats(Message, frozen=True, tag=tag("stats")):
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
    num_numerics_switches: int = 0
    """Times that a request went on at a worker with other numerics."""
    stalled_s: float = 0.0
    """Seconds for which there was work and no progress; 0 while all is well."""
    stall_reason: str = ""
    """Why: `no_worker`, `step` (one does not end), or a reason of `diagnostics`."""
    refused_writes: tuple[tuple[str, int], ...] = ()
    """(worker, or `leader`; writes that were refused because their writer had been replaced)."""


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


MOST_NAMED = 100
"""Requests of each state in an overview; of those that wait the first ones."""


class PoolOverview(Message, frozen=True, tag=tag("overview")):
    """The pool at one moment, for people (`pagewire top`); refreshed with the stats. Its size is bounded."""

    at: float
    """Unix time, seconds."""
    workers: tuple[WorkerOverview, ...] = ()
    running: tuple[RequestOverview, ...] = ()
    """At most the first `MOST_NAMED`, by arrival."""
    waiting: tuple[RequestOverview, ...] = ()
    """Likewise, in their order."""
    swapped: tuple[RequestOverview, ...] = ()
    """Likewise."""
