"""Sampling parameters of the batch in columns, indexed by row, so that a step touches no per-row objects."""

from enum import IntFlag

import numpy as np
import numpy.typing as npt

from shared.sampling import SamplingParams

IntArray = npt.NDArray[np.int64]


class Need(IntFlag):
    """What a row asks of the sampler beyond the largest logit."""

    RANDOM = 1
    PENALTY = 2
    BIAS = 4
    MIN_TOKENS = 8


class SamplingRows:
    """Columns of `max_num_seqs` rows. A row's entries mean something from `set` until the next `set`."""

    def __init__(self, num_rows: int) -> None:
        self.needs = np.zeros(num_rows, np.int64)
        self.seed = np.zeros(num_rows, np.int64)
        self.choice = np.zeros(num_rows, np.int64)
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.top_k = np.zeros(num_rows, np.int64)
        self.temperature = np.ones(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.presence = np.zeros(num_rows, np.float32)
        self.frequency = np.zeros(num_rows, np.float32)
        self.repetition = np.ones(num_rows, np.float32)
        self.with_logprobs = np.zeros(num_rows, np.bool_)

    def set(self, row: int, params: SamplingParams) -> None:
        """Take over a row's parameters."""
        self.needs[row] = needs_of(params)
        self.seed[row] = params.seed
        self.choice[row] = params.choice
        self.min_tokens[row] = params.min_tokens
        self.top_k[row] = params.top_k
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = params.repetition_penalty
        self.with_logprobs[row] = params.with_logprobs


def needs_of(params: SamplingParams) -> Need:
    """The stages that these parameters switch on."""
    needs = Need(0)
    if not params.is_greedy:
        needs |= Need.RANDOM
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        needs |= Need.PENALTY
    if params.logit_bias:
        needs |= Need.BIAS
    if params.min_tokens > 0:
        needs |= Need.MIN_TOKENS
    return needs
