"""How many sequences a request asks for, and what of it can be: `n`, `best_of`, beam search.

Every candidate is a request of its own in the pool. Only a beam search is one request, whose beams the scheduler keeps.
"""

from typing import Any, Protocol

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
    "min_tokens": (0,),
}


def check_room(body: ChoiceFields, prompt_lengths: list[int], cap_requests: int) -> None:
    """Refuse what can never be queued together. `cap_requests`: most queued requests, 0 = no cap.

    Raises:
        InvalidRequest: names `n`, `best_of` or `prompt`, whichever makes it too many.
    """
    per_prompt = 1 if body.use_beam_search else body.num_candidates
    count = per_prompt * len(prompt_lengths)
    most = min(MAX_SEQUENCES, cap_requests) if cap_requests else MAX_SEQUENCES
    name = "prompt" if per_prompt == 1 else "n" if body.best_of is None else "best_of"
    if count > most:
        raise _too_large(name, f"{count} sequences, but one request may have {most}")
    num_tokens = per_prompt * sum(prompt_lengths)
    if num_tokens > MAX_QUEUED_TOKENS:
        raise _too_large(name, f"{count} sequences have {num_tokens} prompt tokens, at most {MAX_QUEUED_TOKENS}")


def _refusal(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {message}", param=name)


def _too_large(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {message}", param=name, code="request_too_large")
