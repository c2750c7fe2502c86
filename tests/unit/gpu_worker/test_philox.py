import numpy as np
import pytest

from services.gpu_worker.sampling.philox import philox4x32, uniforms

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


def test_a_draw_depends_on_its_own_numbers_only() -> None:
    alone = uniforms(column(7), column(0), column(3))
    among = uniforms(column(1, 7, 2**63 - 1), column(0, 0, 1), column(9, 3, 2**31))
    assert among[1] == alone[0]


def test_seed_choice_and_index_each_change_the_draw() -> None:
    draws = uniforms(column(7, 8, 7 + 2**32, 7, 7, 7), column(0, 0, 0, 1, 0, 0), column(3, 3, 3, 3, 4, 3 + 2**32))
    assert len(set(draws.tolist())) == 6


def test_uniforms_are_uniform_and_below_one() -> None:
    count = 20_000
    draws = uniforms(np.full(count, 5, np.int64), np.zeros(count, np.int64), np.arange(count))
    assert draws.min() >= 0
    assert draws.max() < 1
    bins = np.histogram(draws, bins=50, range=(0, 1))[0]
    chi_square = ((bins - count / 50) ** 2 / (count / 50)).sum()
    assert chi_square < 85.4, "99.9 % of a chi-square with 49 degrees of freedom"
