"""Free runs alone: they merge, tables continue theirs, and the fit decides elsewhere."""

import random

import pytest

from services.scheduler.core.extents import Fit, FreeExtents

RUNS = [(0, 3), (10, 8), (30, 4), (50, 20)]


def test_neighbours_merge_on_both_sides() -> None:
    extents = FreeExtents([(0, 2), (3, 2)])
    extents.give(2)
    assert extents.runs() == [(0, 5)]
    extents.give(6, 3)
    assert extents.runs() == [(0, 5), (6, 3)]
    extents.give(5)
    assert (extents.runs(), len(extents)) == ([(0, 9)], 9)


@pytest.mark.parametrize(("fit", "start"), [(Fit.FIRST, 10), (Fit.BEST, 30), (Fit.WORST, 50)])
def test_the_fit_chooses_the_run(fit: Fit, start: int) -> None:
    assert FreeExtents(RUNS, fit).take(4) == [start, start + 1, start + 2, start + 3]


@pytest.mark.parametrize("fit", Fit)
def test_a_table_continues_its_run_whatever_the_fit(fit: Fit) -> None:
    extents = FreeExtents(RUNS, fit)
    assert extents.take(2, after=29) == [30, 31]
    assert extents.take(2, after=31) == [32, 33]


@pytest.mark.parametrize("fit", Fit)
def test_what_no_run_holds_comes_in_few_pieces(fit: Fit) -> None:
    extents = FreeExtents(RUNS, fit)
    assert extents.take(28) == [*range(50, 70), *range(10, 18)]
    assert extents.runs() == [(0, 3), (30, 4)]


def test_of_equal_runs_the_lowest_is_taken() -> None:
    for fit in Fit:
        assert FreeExtents([(40, 5), (20, 5), (60, 5)], fit).take(2) == [20, 21]


def test_tables_that_cannot_go_on_share_one_run() -> None:
    extents = FreeExtents([(5, 1), (10, 10)])
    assert extents.take_each([3, 4, 9, 7]) == [11, 5, 10, 12]


@pytest.mark.parametrize("fit", Fit)
def test_any_history_gives_the_runs_and_the_choices_of_a_naive_map(fit: Fit) -> None:
    """Against a set of blocks; and a copy made from the runs goes on alike."""
    chance = random.Random(5)
    extents = FreeExtents([(0, 300)], fit)
    free = set(range(300))
    tables: list[list[int]] = []
    for _ in range(1500):
        if tables and (chance.random() < 0.5 or not free):
            gone = tables.pop(chance.randrange(len(tables)))
            for block in gone:
                extents.give(block)
            free.update(gone)
        else:
            number = chance.randint(1, min(12, len(free)))
            start = _chosen(free, number, fit)
            copy = FreeExtents(extents.runs(), fit)
            taken = extents.take(number)
            assert taken == copy.take(number)
            assert len(set(taken)) == number and free.issuperset(taken)
            assert start is None or taken == list(range(start, start + number))
            free.difference_update(taken)
            tables.append(taken)
        assert extents.runs() == _runs(free)
        assert len(extents) == len(free)


def _runs(free: set[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for block in sorted(free):
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


def _chosen(free: set[int], number: int, fit: Fit) -> int | None:
    fitting = [(start, length) for start, length in _runs(free) if length >= number]
    keys = {
        Fit.FIRST: lambda run: run[0],
        Fit.BEST: lambda run: (run[1], run[0]),
        Fit.WORST: lambda run: (-run[1], run[0]),
    }
    return min(fitting, key=keys[fit])[0] if fitting else None
