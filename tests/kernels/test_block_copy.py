import random

import numpy as np
import pytest
import torch

from kernels.block_copy.api import copy_blocks, find_runs


def tensor(num_blocks: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_blocks, 3, 2, 5, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pairs(*values: tuple[int, int]) -> np.ndarray:
    return np.array(values, np.int64).reshape(-1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [0, 1, 2, 37, 63])
def test_named_blocks_are_copied_and_nothing_else(count: int, dtype: torch.dtype) -> None:
    draw = random.Random(count)
    source, destination = tensor(63, dtype=dtype), tensor(100, seed=1, dtype=dtype)
    chosen = list(zip(draw.sample(range(63), count), draw.sample(range(100), count), strict=True))
    expected = destination.clone()
    for first, to in chosen:
        expected[to] = source[first]
    before = source.clone()
    copy_blocks(source, destination, pairs(*chosen))
    assert destination.equal(expected) and source.equal(before)


def test_one_source_may_have_several_destinations_and_nan_is_copied_as_it_is() -> None:
    memory = tensor(6)
    memory[2, 1] = float("nan")
    copy_blocks(memory, memory, pairs((2, 4), (2, 5)))
    for block in (4, 5):
        assert memory[block].equal(memory[2]) or memory[block].isnan().equal(memory[2].isnan())
        assert memory[block].nan_to_num().equal(memory[2].nan_to_num())


def test_neighbours_become_one_copy() -> None:
    """What contiguous block tables pay for: a swap of 64 blocks is one copy, not 64."""
    source, destination = tensor(64), torch.zeros(80, 3, 2, 5, 7)
    together = pairs(*((block, block + 16) for block in range(64)))
    assert copy_blocks(source, destination, together) == 1
    assert destination[16:].equal(source)
    backwards = together[::-1].copy()
    assert copy_blocks(source, destination, backwards) == 64


@pytest.mark.parametrize(
    ("chosen", "runs"),
    [
        ([], []),
        ([(4, 9)], [(4, 9, 1)]),
        ([(0, 5), (1, 6), (2, 7)], [(0, 5, 3)]),
        ([(0, 5), (1, 7), (2, 8)], [(0, 5, 1), (1, 7, 2)]),  # the destination jumps
        ([(0, 5), (2, 6), (3, 7), (3, 8)], [(0, 5, 1), (2, 6, 2), (3, 8, 1)]),  # the source jumps, then stays
        ([(2, 2), (1, 1)], [(2, 2, 1), (1, 1, 1)]),
    ],
)
def test_runs(chosen: list[tuple[int, int]], runs: list[tuple[int, int, int]]) -> None:
    assert [tuple(run) for run in find_runs(pairs(*chosen)).tolist()] == runs


WRONG = {
    "source out of range": (pairs((8, 0)), "out of range"),
    "destination out of range": (pairs((0, 8)), "out of range"),
    "negative": (pairs((0, -1)), "out of range"),
    "written twice": (pairs((0, 5), (1, 5)), "named twice"),
    "read and written": (pairs((0, 1), (1, 2)), "a source is a destination"),
    "copied to itself": (pairs((3, 3)), "a source is a destination"),
    "no pairs": (np.zeros(4, np.int64), "pairs"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_pairs_are_refused(fault: str) -> None:
    chosen, message = WRONG[fault]
    memory = tensor(8)
    before = memory.clone()
    with pytest.raises(ValueError, match=message):
        copy_blocks(memory, memory, chosen)
    assert memory.equal(before)


def test_other_tensors_may_share_numbers_but_not_differ_in_shape_or_dtype() -> None:
    copy_blocks(tensor(8), tensor(8, seed=1), pairs((0, 1), (1, 2)))
    for other in (torch.zeros(8, 3, 2, 7, 5), tensor(8, dtype=torch.bfloat16), tensor(8).transpose(1, 2)):
        with pytest.raises(ValueError, match="copy_blocks"):
            copy_blocks(tensor(8), other, pairs((0, 1)))
