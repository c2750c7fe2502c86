import pytest

from services.gpu_worker.engine.rates import Rates


def test_large_copies_weigh_more_than_small_ones() -> None:
    rates = Rates()
    rates.record_copy(1_000, 0.001)
    rates.record_copy(1_000_000, 0.1)
    assert rates.values[2] == pytest.approx(1_000_900 / 0.1009, rel=1e-3)


def test_old_copies_are_forgotten() -> None:
    rates = Rates()
    rates.record_copy(10**9, 0.1)
    for _ in range(100):
        rates.record_copy(10**6, 1.0)
    assert rates.values[2] == pytest.approx(1e6, rel=0.01)


def test_what_took_no_time_or_moved_nothing_counts_for_nothing() -> None:
    rates = Rates()
    rates.record(0, 0, 0.5)  # a plan that only drops
    rates.record(0, 8, 0.0)
    rates.record_copy(0, 0.1)
    assert rates.values == (0.0, 0.0, 0.0)
    rates.record(0, 8, 0.5)
    rates.record(0, 0, 0.5)
    assert rates.values[1] == 16.0
