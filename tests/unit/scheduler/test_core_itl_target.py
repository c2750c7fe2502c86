"""Long prompts beside running streams: how long a stream waits for its next token. Time is counted, not measured."""

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.rates import Rates, newest_rates, prefill_tokens_within
from tests.fakes.scheduler_world import World, make_submission

PREFILL_RATE, DECODE_RATE = 2_000.0, 400.0
"""Tokens per second: 8 decode rows take 20 ms, and 16,000 tokens of prefill 8 s."""
NUM_STREAMS, PROMPT = 8, 16_000


def stream_gaps(itl_target_s: float, rates: tuple[float, ...]) -> tuple[list[float], int]:
    """Seconds between two tokens of 8 decoding streams, from when a long prompt came; steps that the prompt took."""
    config = SchedulerConfig(
        max_model_len=PROMPT + 2_000, max_num_batched_tokens=2_048, plan_ahead=1, itl_target_s=itl_target_s
    )
    world = World(config)
    world.join("w", 3 * (PROMPT // config.block_size))
    world.workers["w"].rates = rates
    for number in range(NUM_STREAMS):
        prompt = [1 + number] * 4
        world.submit(make_submission(f"s{number}", prompt, max_tokens=1_500, min_tokens=1_500, ignore_eos=True))
    for _ in range(3):
        world.turn()
        world.step("w")
    world.submit(make_submission("long", [1 + place % 20 for place in range(PROMPT)], max_tokens=1))
    gaps = []
    while world.readers["long"].terminal is None:
        world.turn()
        plan = world.workers["w"].inbox[-1]
        gaps.append(NUM_STREAMS / DECODE_RATE + sum(size for _, size in plan.chunks) / PREFILL_RATE)
        world.step("w")
        world.turn()
    return gaps, len(gaps)


def test_case_82_a_long_prefill_does_not_stall_the_others() -> None:
    rates = (PREFILL_RATE, DECODE_RATE, 0.0)
    gaps, num_steps = stream_gaps(0.05, rates)
    alone = NUM_STREAMS / DECODE_RATE
    assert max(gaps) < 3 * alone and max(gaps) <= 0.05 + 1e-9, "not only even: near what they had before it came"
    assert num_steps == -(-PROMPT // 60)  # 30 ms a step are left for prefill: 60 tokens
    assert max(stream_gaps(0.0, rates)[0]) > 20 * 0.05, "without the target the budget of tokens alone is too coarse"


def test_a_target_that_decode_alone_misses_still_lets_a_block_through() -> None:
    gaps, num_steps = stream_gaps(0.001, (PREFILL_RATE, DECODE_RATE, 0.0))
    assert num_steps == -(-PROMPT // 16)
    assert max(gaps) == pytest.approx(NUM_STREAMS / DECODE_RATE + 16 / PREFILL_RATE)


@pytest.mark.parametrize(("prefill", "decode", "most"), [(1.0, 5e-324, 0), (1e308, 1e308, 2**31 - 1)])
def test_rates_that_no_machine_has_are_survived(prefill: float, decode: float, most: int) -> None:
    assert prefill_tokens_within(100.0, 8, Rates(prefill, decode)) == most


def test_unknown_rates_bound_nothing() -> None:
    assert stream_gaps(0.05, ())[1] == stream_gaps(0.0, ())[1]
    assert prefill_tokens_within(0.05, 8, Rates(0.0, 400.0)) is None
    assert prefill_tokens_within(0.05, 8, Rates(2_000.0, 0.0)) is None
    assert prefill_tokens_within(0.05, 0, Rates(2_000.0, 400.0)) is None


@pytest.mark.parametrize("told", [(), (1.0,), (1.0, 2.0, -1.0), (float("nan"), 1.0, 1.0), (1.0, float("inf"), 1.0)])
def test_rates_without_sense_are_passed_over(told: tuple[float, ...]) -> None:
    known = Rates(1.0, 2.0, 3.0)
    assert newest_rates(known, told) == known
    assert newest_rates(known, (4.0, 5.0, 6.0)) == Rates(4.0, 5.0, 6.0)
