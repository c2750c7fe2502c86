"""What is stored of a request."""

from shared.messages.codec import Message, Part, tag
from shared.messages.endings import FinishReason
from shared.sampling import SamplingParams


class Submission(Message, frozen=True, tag=tag("submission")):
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


class ResponseHead(Message, frozen=True, tag=tag("response")):
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


class Final(Message, frozen=True, tag=tag("final")):
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
    num_numerics_switches: int = 0
    """How often it went on at a worker with other numerics: from there on, another worker's text may differ."""


class UsageRecord(Message, frozen=True, tag=tag("usage")):
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
    num_numerics_switches: int = 0
    """As in `Final`."""
