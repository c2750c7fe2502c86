"""Does the core keep to what workers measured: how long prompts may take beside decode rows, what a swap saves?"""

from collections.abc import Iterable, Iterator

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.cpu_tier import SwappedOut
from services.scheduler.core.lane import Lane
from shared.messages import StepPlan
from tests.fakes.drawn_rates import BLOCK_BYTES

STRETCH = 10
"""Times that a step may take as long as its decode rows alone, for those whose readers wait for their next token."""


def judge_prefill(config: SchedulerConfig, lane: Lane, plan: StepPlan) -> Iterator[str]:
    """After the core decided on `plan`, by the rates that it had been told. What time has done to the prompts."""
    known = lane.rates
    decoding = sum(0 < seat.first < plan.plan_id <= seat.last for seat in lane.seats.values()) + len(plan.beams)
    decode_s = known.decode_base_s + decoding * known.decode_row_s
    if not (config.itl_target_s and decoding and known.prefill and decode_s):
        return
    least = 3 * config.block_size // 2
    for_new = max(least, int((config.itl_target_s - decode_s) * known.prefill))
    bound = max(least, int((max(config.itl_target_s, STRETCH * decode_s) - decode_s) * known.prefill))
    seats = [(lane.seats[row], size) for row, size in plan.chunks]
    num_new = sum(size for seat, size in seats if seat.known == seat.request.num_prompt_tokens)
    num_tokens = sum(size for _, size in seats)
    assert num_new <= for_new, "prompts take longer than a step may"
    assert num_tokens <= bound, "those that go on take longer than a step may for their sake"
    if num_new == for_new < config.max_num_batched_tokens - decoding and lane.prefill:
        yield "prompts cut short"
    if num_tokens > for_new:
        yield "went on beyond the target"


def judge_cost(config: SchedulerConfig, lane: Lane, left: Iterable[SwappedOut]) -> None:
    """Who was swapped out now would take longer to compute again, if that is how it is to be decided."""
    for swapped in left if config.preemption is Preemption.AUTO else ():
        assert lane.rates.prefill and lane.rates.copy, "a guess"
        copying_s = 2 * len(swapped.slots) * BLOCK_BYTES / lane.rates.copy
        assert copying_s < swapped.num_computed / lane.rates.prefill, "to compute it again would be faster"
