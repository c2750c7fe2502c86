"""A request as the scheduler sees it, and its state machine.

       ┌────────────────────── FINISH ────────────────────┐
       │                                                   ▼
    WAITING ──ADMIT──▶ RUNNING ────────FINISH────────▶ FINISHED
       ▲                │ ▲ │                              ▲
       ├─ PREEMPT ──────┤ │ └─SWAP_OUT─▶ SWAPPED ─FINISH───┘
       ├─ REQUEUE ──────┘ └──SWAP_IN─────┤
       └─ REQUEUE ───────────────────────┘

PREEMPT, SWAP_OUT: its blocks were needed by another; after SWAP_OUT what was computed lies in its worker's host pool.
REQUEUE: its worker was fenced or leaves. All keep its committed tokens.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from shared.capacity import most_blocks, most_rows
from shared.errors import PagewireError
from shared.messages import Submission
from shared.packing import pack_int32

if TYPE_CHECKING:
    from services.scheduler.core.cpu_tier import SwappedOut
    from services.scheduler.core.seats import Seat


class RequestState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Signal(StrEnum):
    ADMIT = "admit"
    PREEMPT = "preempt"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    REQUEUE = "requeue"
    FINISH = "finish"


TRANSITIONS: Mapping[tuple[RequestState, Signal], RequestState] = {
    (RequestState.WAITING, Signal.ADMIT): RequestState.RUNNING,
    (RequestState.RUNNING, Signal.PREEMPT): RequestState.WAITING,
    (RequestState.RUNNING, Signal.REQUEUE): RequestState.WAITING,
    (RequestState.RUNNING, Signal.SWAP_OUT): RequestState.SWAPPED,
    (RequestState.SWAPPED, Signal.SWAP_IN): RequestState.RUNNING,
    (RequestState.SWAPPED, Signal.REQUEUE): RequestState.WAITING,
    (RequestState.WAITING, Signal.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, Signal.FINISH): RequestState.FINISHED,
    (RequestState.SWAPPED, Signal.FINISH): RequestState.FINISHED,
}


class IllegalTransition(PagewireError):
    """A signal that the request's state does not know: a bug in the scheduler."""

    def __init__(self, request_id: str, state: RequestState, signal: Signal) -> None:
        super().__init__(f"request {request_id}: no transition for ({state}, {signal})")
        self.state = state
        self.signal = signal


@dataclass(slots=True, eq=False)
class Request:
    """One live request. `output` holds its committed tokens up to the seat's `mark`; the lane has the rest."""

    submission: Submission
    arrival: int
    """Its place: smaller came sooner, unique."""
    state: RequestState = RequestState.WAITING
    output: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    """Log-probabilities of committed output tokens, if `params.with_logprobs`."""
    seat: "Seat | None" = None
    swapped: "SwappedOut | None" = None
    stop_at: int | None = None
    """A stop string completes at this many output tokens, which are not committed yet."""
    num_preemptions: int = 0
    num_deaths: int = 0
    """Workers in a row that died while they had it; see `suspects.py`."""
    arrived_at: float = 0.0
    """When it came, by the tick's time (seconds)."""
    num_bypassed: int = 0
    """Later requests that were admitted before it because it lacked blocks."""
    has_left_queue: bool = False
    """It was admitted once, or ended: it no longer counts against the queue's caps."""
    num_cached_tokens: int = -1
    """Prompt tokens that were cached when it was first admitted; -1 before."""
    fingerprint: str = ""
    """Numerics of the worker that has it, or had it last; empty: not known."""
    num_numerics_switches: int = 0
    """How often it went on at a worker with other numerics."""
    domain: bytes = b""
    """Whose blocks it may share; see `residency.py`, which sets it."""
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of its first full blocks, as far as they have been needed."""

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    @property
    def has_begun(self) -> bool:
        """Whether it ran before; constant while it waits."""
        return self.has_left_queue or len(self.output) > 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submission.prompt_tokens) // 4

    @property
    def num_tokens(self) -> int:
        """Prompt and output known at admission; meaningful while the request has no seat."""
        return self.num_prompt_tokens + len(self.output)

    @property
    def max_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.submission.params.max_tokens

    @property
    def num_rows(self) -> int:
        """Rows that it has while it runs."""
        return most_rows(self.submission.params)

    def most_blocks(self, block_size: int) -> int:
        """Blocks that it has at its longest."""
        return most_blocks(self.num_prompt_tokens, self.submission.params, block_size)

    def tokens_between(self, start: int, stop: int) -> bytes:
        """Packed int32 of the committed tokens `start … stop - 1`."""
        prompt, num_prompt = self.submission.prompt_tokens, self.num_prompt_tokens
        if stop <= num_prompt:
            return prompt[4 * start : 4 * stop]
        return prompt[4 * start :] + pack_int32(self.output[max(0, start - num_prompt) : stop - num_prompt])

    def known_tokens(self) -> bytes:
        """Packed int32: prompt, then committed output."""
        return self.submission.prompt_tokens + pack_int32(self.output)

    def apply(self, signal: Signal) -> None:
        """Move to the state that the table names; the only writer of `state`.

        Raises:
            IllegalTransition: the table names none.
        """
        target = TRANSITIONS.get((self.state, signal))
        if target is None:
            raise IllegalTransition(self.request_id, self.state, signal)
        self.state = target
