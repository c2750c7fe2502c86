"""What a request takes at most: who refuses early and who schedules must agree on it. Pure."""

from shared.sampling import SamplingParams

MAX_BLOCKS = 2**26
"""KV blocks of a worker, and as many in its host pool: the scheduler keeps a counter for each."""


def most_rows(params: SamplingParams) -> int:
    """Rows of a worker's batch that the request has."""
    return max(1, params.beam_width)


def most_blocks(num_prompt_tokens: int, params: SamplingParams, block_size: int) -> int:
    """KV blocks that hold the request at its longest.

    Beams share the prompt's full blocks; from there on each of them may go its own way.
    """
    total = -(-(num_prompt_tokens + params.max_tokens) // block_size)
    num_shared = num_prompt_tokens // block_size
    return num_shared + most_rows(params) * (total - num_shared)


def most_tokens(num_prompt_tokens: int, num_beams: int, block_size: int, num_blocks: int) -> int:
    """Prompt plus `max_tokens` of the longest request with this prompt that `num_blocks` hold: `most_blocks` solved."""
    num_shared = num_prompt_tokens // block_size
    return (num_shared + max(0, num_blocks - num_shared) // max(1, num_beams)) * block_size
