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
    assert rates.values == (0.0, 0.0, 0.0, 0.0)
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
