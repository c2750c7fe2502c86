"""How many sequences a request asks for, and what of it can be: `n`, `best_of`, beam search.

Every candidate is a request of its own in the pool. Only a beam search is one request, whose beams the scheduler keeps.
"""

from typing import Any, Protocol

from shared.capacity import most_tokens
from shared.errors import InvalidRequest
from shared.sampling import GREEDY_BELOW, MAX_BEAM_WIDTH

MAX_SEQUENCES = 256
"""Sequences of one HTTP request, over all of its prompts: they are queued in one step of Redis."""
MAX_QUEUED_TOKENS = 2**22
"""Prompt tokens of all of them: each has a record with its prompt."""


class ChoiceFields(Protocol):
    """What of a body concerns its choices."""

    @property
    def stream(self) -> bool | None: ...
    @property
    def best_of(self) -> int | None: ...
    @property
    def use_beam_search(self) -> bool | None: ...
    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def num_choices(self) -> int: ...
    @property
    def num_candidates(self) -> int: ...

    def number(self, name: str) -> Any: ...


class RequestLimits(Protocol):
    """What a pool can hold; `shared.limits.Limits` is one. 0 means unknown, and of a cap none."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def max_request_tokens(self) -> int: ...
    @property
    def cap_requests(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def max_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...


def check_choices(body: ChoiceFields) -> None:
    """Refuse what contradicts itself.

    Raises:
        InvalidRequest: names the field.
    """
    n, candidates = body.num_choices, body.num_candidates
    if candidates < n:
        raise _refusal("best_of", f"{candidates} is less than n = {n}")
    if body.use_beam_search:
        _check_beam_search(body)
        return
    if body.number("length_penalty") != 1:
        raise _refusal("length_penalty", "only with use_beam_search = true")
    if candidates > n and body.stream:
        raise _refusal(
            "best_of", f"{candidates} candidates for n = {n} cannot be streamed: which are best is known last"
        )


def _check_beam_search(body: ChoiceFields) -> None:
    """A beam search samples nothing: what would change the draw is refused rather than ignored.

    `temperature` may be 0, as older clients of vLLM had to send it, or the default.
    """
    if body.num_candidates > MAX_BEAM_WIDTH:
        name = "n" if body.best_of is None else "best_of"
        raise _refusal(name, f"at most {MAX_BEAM_WIDTH} beams with use_beam_search, got {body.num_candidates}")
    temperature = body.number("temperature")
    if temperature != 1 and not temperature < GREEDY_BELOW:
        raise _refusal("temperature", "must be 0 or 1 with use_beam_search")
    for name, neutral in _NEUTRAL.items():
        if body.number(name) not in neutral:
            raise _refusal(name, "not with use_beam_search, which does not sample")
    if body.logit_bias:
        raise _refusal("logit_bias", "not with use_beam_search")


_NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
}


def check_room(body: ChoiceFields, prompt_lengths: list[int], limits: RequestLimits) -> None:
    """Refuse what can never be queued together, and more beams than a batch has rows.

    Raises:
        InvalidRequest: names `n`, `best_of` or `prompt`, whichever makes it too many.
    """
    per_prompt = 1 if body.use_beam_search else body.num_candidates
    count = per_prompt * len(prompt_lengths)
    most = min(MAX_SEQUENCES, limits.cap_requests) if limits.cap_requests else MAX_SEQUENCES
    width_name = "n" if body.best_of is None else "best_of"
    if body.use_beam_search and 0 < limits.max_rows < body.num_candidates:
        raise _too_large(width_name, f"{body.num_candidates} beams, but a worker computes {limits.max_rows} at once")
    name = "prompt" if per_prompt == 1 else width_name
    if count > most:
        raise _too_large(name, f"{count} sequences, but one request may have {most}")
    num_tokens = per_prompt * sum(prompt_lengths)
    if num_tokens > MAX_QUEUED_TOKENS:
        raise _too_large(name, f"{count} sequences have {num_tokens} prompt tokens, at most {MAX_QUEUED_TOKENS}")


def context_with_beams(body: ChoiceFields, num_prompt_tokens: int, context: int, limits: RequestLimits) -> int:
    """Most tokens of prompt and output: `context`, or less if the beams, each with its own output, need the blocks."""
    if not (body.use_beam_search and limits.max_blocks and limits.block_size):
        return context
    return min(context, most_tokens(num_prompt_tokens, body.num_candidates, limits.block_size, limits.max_blocks))


def _refusal(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {message}", param=name)


def _too_large(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {message}", param=name, code="request_too_large")
