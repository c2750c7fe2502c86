"""Sampling parameters: one table drives validation in the gateway, the documentation and the wire type."""

from dataclasses import dataclass

import msgspec

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing logits by it would overflow float32 (vLLM uses the same bound)."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How a worker samples and ends one row. Defaults sample from the unchanged distribution."""

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    choice: int = 0
    """Index of the choice within the request; part of the draw's counter."""
    with_logprobs: bool = False
    """Results carry the log-probability of each of its tokens (of the unchanged logits)."""
    beam_width: int = 0
    """Above 0: beam search with this many beams."""
    length_penalty: float = 1.0
    """Exponent of the length by which a beam's summed log-probability is divided."""
    num_hypotheses: int = 1
    """Results of a beam search; of a candidate (`with_logprobs`): how many of its group the client gets."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One numeric request parameter: `low <= value <= high`, bounds open where said. NaN fails every comparison."""

    name: str
    type: type
    default: float | int | None
    low: float
    high: float
    doc: str
    low_open: bool = False

    def accepts(self, value: float) -> bool:
        """Whether `value` is inside the range; written so that NaN is not."""
        return (self.low < value if self.low_open else self.low <= value) and value <= self.high

    @property
    def range(self) -> str:
        low, high = (bound if isinstance(bound, int) else f"{bound:g}" for bound in (self.low, self.high))
        return f"{'(' if self.low_open else '['}{low}, {high}]"


MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
MAX_PRIORITY = 1000
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 128
"""Of `n` and `best_of`. Each is a request of its own, and they are queued together: an unbounded number would stop
everyone else (CVE-2026-34756, CVE-2024-8939)."""
MAX_BEAM_WIDTH = 32
"""Each beam reports twice as many candidates as there are beams, in every step: 16 KB a step in the log at 32."""

NUMERIC_PARAMS: tuple[ParamSpec, ...] = (
    ParamSpec("max_tokens", int, None, 1, MAX_COUNT, "Most output tokens; absent or null fills the context."),
    ParamSpec(
        "min_tokens",
        int,
        0,
        0,
        MAX_COUNT,
        "No ending by EOS, stop token or stop string before this many output tokens.",
    ),
    ParamSpec("temperature", float, 1.0, 0, 2, "0 is greedy, and so is anything below 1e-5."),
    ParamSpec(
        "top_p", float, 1.0, 0, 1, "Nucleus: smallest set of tokens whose probability reaches it.", low_open=True
    ),
    ParamSpec(
        "top_k",
        int,
        0,
        -1,
        MAX_COUNT,
        "Keep the k most probable tokens; 0 and -1 keep all; more than the vocabulary keeps all.",
    ),
    ParamSpec("min_p", float, 0.0, 0, 1, "Drop tokens less probable than this share of the most probable one."),
    ParamSpec("presence_penalty", float, 0.0, -2, 2, "Subtracted once from the logit of every token already produced."),
    ParamSpec(
        "frequency_penalty",
        float,
        0.0,
        -2,
        2,
        "Subtracted per occurrence from the logit of every token already produced.",
    ),
    ParamSpec(
        "repetition_penalty",
        float,
        1.0,
        0,
        10,
        "Divides positive and multiplies negative logits of tokens in prompt and output.",
        low_open=True,
    ),
    ParamSpec(
        "seed", int, None, 0, MAX_SEED, "Draws depend on (seed, choice, output index) only; absent picks one at random."
    ),
    ParamSpec(
        "priority",
        int,
        0,
        -MAX_PRIORITY,
        MAX_PRIORITY,
        "Smaller is sooner, if the pool's policy is `priority`; other policies take no notice.",
    ),
    ParamSpec(
        "n", int, 1, 1, MAX_CHOICES, "Choices per prompt. Choice k draws by (seed, k, output index), whatever n is."
    ),
    ParamSpec(
        "best_of",
        int,
        None,
        1,
        MAX_CHOICES,
        "Candidates per prompt, at least n; absent: n. The n with the highest log-probability per token are returned, "
        "all are billed; more than n cannot be streamed. With `use_beam_search` the number of beams, at most "
        f"{MAX_BEAM_WIDTH}.",
    ),
    ParamSpec(
        "length_penalty",
        float,
        1.0,
        -10,
        10,
        "With `use_beam_search`: a result's score is the sum of its log-probabilities over its length to this power.",
    ),
)
"""The table. Lists (`stop`, `stop_token_ids`, `logit_bias`) have their limits above."""
