"""Whether a worker's result can be that of its plan. One that cannot ends the worker: see `Lane.broken`."""

from typing import TYPE_CHECKING

from services.scheduler.core import beam_rows, logprobs
from services.scheduler.core.seats import Seat
from shared.messages import EndReason, StepResult
from shared.packing import NO_TOKEN, are_tokens, pack_int32

if TYPE_CHECKING:
    from services.scheduler.core.lane import Lane

_NOTHING = pack_int32([NO_TOKEN])
_END_REASONS = frozenset(EndReason)


def contradicts(lane: "Lane", result: StepResult) -> bool:
    """Whether the result of the lane's oldest plan in flight is not one that this plan can have."""
    tokens, planned = result.tokens, lane.in_flight[0]
    if len(tokens) % 4 or len(tokens) > 4 * lane.config.max_num_seqs or not are_tokens(tokens):
        return True
    num_ended_silent = 0
    ended = set()
    for row, reason in result.ended:
        seat = lane.seats.get(row) or lane.ghosts.get(row) or lane.beam_rows.get(row)
        if seat is None or row in ended or reason not in _END_REASONS:
            return True
        if isinstance(seat, Seat) and seat.beams is not None and reason != EndReason.ERROR:
            return True
        ended.add(row)
        num_ended_silent += seat.yields_in(result.step_id) and is_silent(tokens, row)
    if result.logprobs and not logprobs.are_sound(result):
        return True
    if beam_rows.contradicts(planned, result, ended):
        return True
    # Token ids are not negative, so four 0xff bytes are NO_TOKEN at any alignment.
    num_yields = len(tokens) // 4 - tokens.count(_NOTHING)
    return num_yields + num_ended_silent != planned.num_yields or not lane.clock.due(result.step_id).keys() <= ended


def is_silent(tokens: bytes, row: int) -> bool:
    """Whether the row yielded nothing in the step with these packed tokens."""
    value = tokens[4 * row : 4 * row + 4]
    return not value or value == _NOTHING
