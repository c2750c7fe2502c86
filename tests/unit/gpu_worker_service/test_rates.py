import pytest

from services.gpu_worker.engine.rates import Rates


def test_large_copies_weigh_more_than_small_ones() -> None:
    rates = Rates()
    rates.record_copy(1_000, 0.001)
    rates.record_copy(1_000_000, 0.1)
    assert rates.values[3] == pytest.approx(1_000_900 / 0.1009, rel=1e-3)


def test_old_copies_are_forgotten() -> None:
    rates = Rates()
    rates.record_copy(10**9, 0.1)
    for _ in range(100):
        rates.record_copy(10**6, 1.0)
    assert rates.values[3] == pytest.approx(1e6, rel=0.01)


def test_what_took_no_time_or_moved_nothing_counts_for_nothing() -> None:
    rates = Rates()
    rates.record(0, 0, 0.5)  # a plan that only drops
    rates.record(0, 8, 0.0)
    rates.record_copy(0, 0.1)
    assert rates.values == (0.0, 0.0, 0.0, 0.0, 0.0)
    rates.record(0, 8, 0.5)
    rates.record(0, 0, 0.5)
    assert rates.values[1:3] == (0.5, 0.0)


def step_s(rows: int) -> float:
    """Of a worker that reads its weights in 80 ms, whatever the batch."""
    return 0.08 + 0.0036 * rows


def test_a_decode_step_is_a_line_over_its_rows() -> None:
    rates = Rates()
    for rows in (64, 1):  # as at warm-up
        rates.record(0, rows, step_s(rows))
    assert rates.values[1:3] == pytest.approx((0.08, 0.0036), rel=1e-4)


def test_a_batch_that_stays_keeps_the_slope_and_follows_the_speed() -> None:
    """1,000 steps of 8 rows say nothing on 9; that all steps take twice as long is seen."""
    rates = Rates()
    for rows in (64, 1):
        rates.record(0, rows, step_s(rows))
    for step in range(1_000):
        rates.record(0, 8, 2 * step_s(8) + (0.001 if step % 2 else -0.001))
    base_s, row_s = rates.values[1:3]
    assert base_s + 8 * row_s == pytest.approx(2 * step_s(8), rel=0.01)
    assert row_s == pytest.approx(0.0036, rel=0.7) and base_s > 0


def test_what_a_mixed_step_takes_beyond_its_rows_is_prefill() -> None:
    rates = Rates()
    for rows in (64, 1):
        rates.record(0, rows, step_s(rows))
    rates.record(100, 8, step_s(8) + 100 / 400)
    assert rates.values[0] == pytest.approx(400, rel=1e-3)


TOKEN_S, PAIR_S = 0.0027, 5e-7
"""Of prefill: after 5,400 tokens a token costs twice as much as at the beginning."""


def prefill(rates: Rates, sizes: list[int], *, start: int = 0) -> None:
    """Chunks of one prompt, from its token `start` on."""
    for size in sizes:
        pairs = sum(range(start + 1, start + size + 1))
        rates.record(size, 0, size * TOKEN_S + pairs * PAIR_S, pairs)
        start += size


def test_what_context_costs_is_told_apart_from_what_a_token_costs() -> None:
    rates = Rates()
    prefill(rates, [512, 512, 512, 512, 300])
    assert (1 / rates.values[0], rates.values[4]) == pytest.approx((TOKEN_S, PAIR_S), rel=1e-3)
    prefill(rates, [64] * 100)
    assert rates.values[4] == pytest.approx(PAIR_S, rel=0.01), "also where chunks are small"


def test_short_prompts_say_nothing_about_context() -> None:
    """Their times differ for other reasons: a slope from these would be forty times the right one."""
    rates = Rates()
    for seconds in (0.1, 0.14):
        rates.record(32, 0, seconds, 528 if seconds < 0.12 else 1552)
    assert rates.values[4] == 0.0
    assert 32 / 0.14 < rates.values[0] < 32 / 0.1


def test_context_never_explains_all_of_the_time() -> None:
    rates = Rates()
    for start in (0, 2048):
        pairs = sum(range(start + 1, start + 65))
        rates.record(64, 0, pairs * PAIR_S, pairs)
    prefill_rate, *_, pair_s = rates.values
    assert prefill_rate > 0 and 0 < pair_s < PAIR_S
