"""Why a request can never be served."""

from typing import TYPE_CHECKING

from services.scheduler.core.beams import MAX_LENGTH_PENALTY
from services.scheduler.core.request import Request

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


def refusal(core: "SchedulerCore", request: Request) -> str:
    """Why no worker that is expected can ever serve the request; empty if one can."""
    num_prompt, max_tokens = request.num_prompt_tokens, request.submission.params.max_tokens
    if not num_prompt or len(request.submission.prompt_tokens) % 4 or max_tokens < 1:
        return f"a prompt of {num_prompt} tokens with max_tokens {max_tokens} cannot be scheduled"
    largest = core.largest_request_tokens()
    if request.max_total_tokens <= largest:
        return _refusal_of_beams(core, request)
    limit = "max_model_len" if largest == core.config.max_model_len else "the KV cache of the largest worker"
    total = request.max_total_tokens
    return f"prompt ({num_prompt}) plus max_tokens ({max_tokens}) is {total} tokens, but {limit} holds {largest}"


def _refusal_of_beams(core: "SchedulerCore", request: Request) -> str:
    params = request.submission.params
    width = params.beam_width
    if not width:
        return ""
    if not (1 <= params.num_hypotheses <= width and abs(params.length_penalty) <= MAX_LENGTH_PENALTY):
        return f"{params.num_hypotheses} results of {width} beams with length_penalty {params.length_penalty}"
    if width > core.config.max_rows:
        return f"{width} beams need {width} sequences at once, but a worker takes {core.config.max_rows}"
    needed, largest = request.most_blocks(core.config.block_size), core.largest_worker_blocks()
    if largest and needed > largest:
        return f"{width} beams may need {needed} blocks, but the KV cache of the largest worker has {largest}"
    return ""
