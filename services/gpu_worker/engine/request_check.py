"""Last line of defence against requests that a gateway should have refused: they end alone, unnoticed by others."""

import math

import numpy as np
import numpy.typing as npt

from shared.sampling import SamplingParams


def is_usable(tokens: npt.NDArray[np.int64], params: SamplingParams, vocab_size: int) -> bool:
    """Whether the tokens exist and the parameters mean something for this vocabulary."""
    if not ((tokens >= 0) & (tokens < vocab_size)).all():
        return False
    numbers = (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        *(value for _, value in params.logit_bias),
    )
    return (
        all(math.isfinite(number) for number in numbers)
        and params.temperature >= 0
        and 0 < params.top_p <= 1
        and 0 <= params.min_p <= 1
        and params.repetition_penalty > 0
        and params.max_tokens >= 1
        and params.seed >= 0
        and params.choice >= 0
        and all(0 <= token < vocab_size for token, _ in params.logit_bias)
        and params.beam_width >= 0
        and not (params.beam_width and _changes_logits(params))
    )


def _changes_logits(params: SamplingParams) -> bool:
    """Whether a search, which ranks the model's own probabilities, would have to leave something out."""
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    return bool(penalised or params.logit_bias)
