"""Long prompts beside running streams: how long a stream waits for its next token. Time is counted, not measured."""

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.prefill_budget import LEAST_BLOCKS
from services.scheduler.core.rates import Rates, newest_rates, prefill_tokens_within
from tests.fakes.scheduler_world import World, make_submission

PREFILL_RATE, BASE_S, ROW_S = 2_000.0, 0.016, 0.0005
"""8 decode rows take 20 ms, most of it whatever their number; 16,000 tokens of prefill take 8 s."""
NUM_STREAMS, PROMPT = 8, 16_000
ALONE_S = BASE_S + NUM_STREAMS * ROW_S
RATES = (PREFILL_RATE, BASE_S, ROW_S, 0.0)
SHORTER, PAIR_S = 2_800, 25e-8
"""At the end of such a prompt a token takes 1.2 ms instead of 0.5."""


def stream_gaps(
    itl_target_s: float, rates: tuple[float, ...], *, num_prompt: int = PROMPT, pair_s: float = 0.0
) -> tuple[list[float], int]:
    """Seconds between two tokens of 8 decoding streams, from when a long prompt came; steps that the prompt took.

    `pair_s`: what a token of it really takes for each that it attends to.
    """
    config = SchedulerConfig(
        max_model_len=PROMPT + 2_000, max_num_batched_tokens=2_048, plan_ahead=1, itl_target_s=itl_target_s
    )
    world = World(config)
    world.join("w", 3 * (PROMPT // config.block_size), rates=[rates])
    for number in range(NUM_STREAMS):
        prompt = [1 + number] * 4
        world.submit(make_submission(f"s{number}", prompt, max_tokens=1_500, min_tokens=1_500, ignore_eos=True))
    for _ in range(3):
        world.turn()
        world.step("w")
    world.submit(make_submission("long", [1 + place % 20 for place in range(num_prompt)], max_tokens=1))
    gaps: list[float] = []
    start = 0
    while world.readers["long"].terminal is None:
        world.turn()
        plan = world.workers["w"].inbox[-1]
        size = sum(size for _, size in plan.chunks)
        gaps.append(ALONE_S + size / PREFILL_RATE + pair_s * size * (start + size / 2))
        start += size
        world.step("w")
        world.turn()
    return gaps, len(gaps)


def test_case_82_a_long_prefill_does_not_stall_the_others() -> None:
    gaps, num_steps = stream_gaps(0.05, RATES)
    assert max(gaps) < 3 * ALONE_S and max(gaps) <= 0.05 + 1e-9, "not only even: near what they had before it came"
    assert num_steps == -(-PROMPT // 60)  # 30 ms a step are left for prefill: 60 tokens
    assert max(stream_gaps(0.0, RATES)[0]) > 20 * 0.05, "without the target the budget of tokens alone is too coarse"


def test_chunks_become_smaller_as_the_context_grows() -> None:
    """The target holds at the end of a long prompt too, where attention takes most of the time."""
    gaps, _ = stream_gaps(0.05, (*RATES, PAIR_S), num_prompt=SHORTER, pair_s=PAIR_S)
    assert max(gaps) <= 0.05 + 1e-9
    assert min(gaps[:-1]) > 0.045, "and what it allows is used"
    blind, _ = stream_gaps(0.05, RATES, num_prompt=SHORTER, pair_s=PAIR_S)
    assert max(blind) > 0.09, "a worker that does not tell what context costs is taken at its word"


def test_tokens_that_fit_take_the_time_that_is_left() -> None:
    rates = Rates(PREFILL_RATE, BASE_S, ROW_S, 0.0, PAIR_S)
    for num_before in (0, 100, 50_000):
        fitting = prefill_tokens_within(1.0, 8, rates, num_before)
        assert fitting is not None
        assert rates.prefill_s(fitting, num_before) <= 1.0 - ALONE_S < rates.prefill_s(fitting + 1, num_before)


def test_a_target_that_decode_alone_misses_still_lets_prompts_go_on() -> None:
    least = int(LEAST_BLOCKS * SchedulerConfig(max_model_len=1).block_size)
    gaps, num_steps = stream_gaps(0.001, RATES)
    assert num_steps == -(-PROMPT // least)
    assert max(gaps) == pytest.approx(ALONE_S + least / PREFILL_RATE)


@pytest.mark.parametrize(("prefill", "row_s", "most"), [(1.0, 1e308, 0), (1e308, 5e-324, 2**31 - 1)])
def test_rates_that_no_machine_has_are_survived(prefill: float, row_s: float, most: int) -> None:
    assert prefill_tokens_within(100.0, 8, Rates(prefill, decode_row_s=row_s)) == most
    assert prefill_tokens_within(100.0, 8, Rates(prefill, decode_row_s=row_s, pair_s=1e308), num_before=100) == 0


def test_unknown_rates_bound_nothing() -> None:
    assert stream_gaps(0.05, ())[1] == stream_gaps(0.0, ())[1]
    assert prefill_tokens_within(0.05, 8, Rates(0.0, 0.01)) is None
    assert prefill_tokens_within(0.05, 8, Rates(2_000.0)) is None
    assert prefill_tokens_within(0.05, 0, Rates(2_000.0, 0.01)) is None


@pytest.mark.parametrize(
    "told", [(), (1.0,), (1.0, 2.0, 3.0, -1.0), (float("nan"), 1.0, 1.0, 1.0), (1.0, float("inf"), 1.0, 1.0)]
)
def test_rates_without_sense_are_passed_over(told: tuple[float, ...]) -> None:
    known = Rates(1.0, 2.0, 3.0, 4.0)
    assert newest_rates(known, told) == known
    assert newest_rates(known, (4.0, 5.0, 6.0, 7.0)) == Rates(4.0, 5.0, 6.0, 7.0)
    assert newest_rates(known, (4.0, 5.0, 6.0, 7.0, 8.0)) == Rates(4.0, 5.0, 6.0, 7.0, 8.0)
    assert newest_rates(known, (4.0, 5.0, 6.0, 7.0, 8.0, 9.0)) == known
