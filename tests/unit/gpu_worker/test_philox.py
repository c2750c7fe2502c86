import numpy as np
import pytest

from services.gpu_worker.sampling.philox import exponentials, philox4x32

KNOWN_ANSWERS = [
    # counter, key, output: the published vectors of the Random123 library for ten rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32(*(tuple(np.array([word], np.uint64) for word in words) for words in (counter, key)))
    assert tuple(int(word[0]) for word in words) == expected


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_times_depend_on_their_own_numbers_only() -> None:
    alone = exponentials(column(7), column(0), column(3), 8)
    among = exponentials(column(1, 7, 2**63 - 1), column(0, 0, 1), column(9, 3, 2**31), 8)
    more = exponentials(column(7), column(0), column(3), 12)
    assert among[1].tolist() == alone[0].tolist() == more[0, :8].tolist()


def test_seed_choice_index_and_place_each_change_the_time() -> None:
    seeds, indices = column(7, 8, 7 + 2**32, 7, 7, 7), column(3, 3, 3, 3, 4, 3 + 2**32)
    times = exponentials(seeds, column(0, 0, 0, 1, 0, 0), indices, 16)
    assert len(set(times.ravel().tolist())) == 6 * 16


def test_times_are_exponential() -> None:
    """Chi-square over 50 intervals of equal probability, among neighbours in a draw as well as among draws."""
    count = 4000
    times = exponentials(np.full(count, 5, np.int64), np.zeros(count, np.int64), np.arange(count), 8)
    assert times.min() > 0
    assert times.max() < 23
    for some in (times[:, 0], times[:, 5], times[:500].ravel()):
        bins = np.histogram(np.exp(-some), bins=50, range=(0, 1))[0]
        chi_square = ((bins - count / 50) ** 2 / (count / 50)).sum()
        assert chi_square < 85.4, "99.9 % of a chi-square with 49 degrees of freedom"
    assert abs(np.corrcoef(times[:, 0], times[:, 1])[0, 1]) < 0.05
