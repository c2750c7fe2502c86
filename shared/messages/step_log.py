"""The step log: workers and leader → everyone."""

from shared.messages.codec import Message, Part, tag
from shared.messages.endings import EventKind
from shared.messages.plans import Tick


class Candidates(Part, frozen=True):
    """What may follow the sequence of one beam row, best first; equal ones by token."""

    row: int
    tokens: bytes
    """Packed int32; `-1 - token` if the token would end the row (EOS or stop token)."""
    logprobs: bytes
    """Packed float32: log-softmax of the row's logits."""


class StepResult(Message, frozen=True, tag=tag("step")):
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
    """In the first step and every 64, measured: prefill tokens/s, seconds of a decode step and of each row, copy
    bytes/s, seconds of prefill per token and context token; 0: not known."""
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


class TickEntry(Message, frozen=True, tag=tag("tick")):
    """What a tick decided for readers of the log. `tick` is set if no plan carries it."""

    tick: Tick | None = None
    events: tuple[RequestEvent, ...] = ()
    cached: tuple[tuple[str, int], ...] = ()
    """(request_id, prompt tokens that the prefix cache held) of requests that were admitted for the first time."""


class WorkerFenced(Message, frozen=True, tag=tag("fenced")):
    """From here on `incarnation` of `worker` cannot have published anything more."""

    worker: str
    incarnation: int
    reason: str = ""


LogMessage = StepResult | TickEntry | WorkerFenced
