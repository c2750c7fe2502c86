"""Log-probabilities of the tokens of requests that ask for them (`params.with_logprobs`), one per output token.

They come with the results and stay with the request, whatever becomes of its seat: so a preemption, another worker or a
restart loses none. A stop string cuts the output afterwards, hence one number per token and not their sum.
"""

from array import array
from collections.abc import Mapping
from itertools import islice
from math import isnan

from services.scheduler.core.request import Request
from services.scheduler.core.seats import Seat
from shared.messages import StepResult
from shared.packing import pack_float32

MAX_FLOAT32 = 3.4e38


def are_sound(result: StepResult) -> bool:
    """Whether the log-probabilities can be of the result's tokens: a number each, no row twice."""
    rows = {row for row, _ in result.logprobs}
    return len(rows) == len(result.logprobs) and not any(isnan(value) for _, value in result.logprobs)


def note(seats: Mapping[int, Seat], result: StepResult) -> None:
    """Give every seat that yields a token in this result the token's log-probability."""
    for row, value in result.logprobs:
        seat = seats.get(row)
        if seat is not None and seat.yields_in(result.step_id) and seat.request.submission.params.with_logprobs:
            index = seat.known - seat.request.num_prompt_tokens + result.step_id - seat.first
            fill(seat.request.logprobs, index)
            seat.request.logprobs.append(max(value, -MAX_FLOAT32))


def fill(logprobs: "array[float]", num_tokens: int) -> None:
    """Tokens whose log-probability was not told (by a worker or a record of an earlier version) count as certain."""
    logprobs.extend([0.0] * (num_tokens - len(logprobs)))


def packed(request: Request, num_output_tokens: int) -> bytes:
    """Packed float32 of the first output tokens; empty if the request did not ask, or searched with beams."""
    if not request.submission.params.with_logprobs or request.submission.params.beam_width:
        return b""
    fill(request.logprobs, num_output_tokens)
    return pack_float32(request.logprobs[:num_output_tokens])


def cumulative(request: Request, num_output_tokens: int) -> float:
    """Sum over the first output tokens; 0 if the request did not ask."""
    return sum(islice(request.logprobs, num_output_tokens), 0.0)
