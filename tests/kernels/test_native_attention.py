"""Paged attention by the C++ kernels, at every dispatch level of this machine."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kernels.kv_codec import reference as codec
from kernels.kv_layout.api import (
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
    vector_width,
    view_keys,
    view_values,
)
from kernels.native.library import Library
from kernels.paged_attention import native as native_attention
from kernels.paged_attention.api import paged_attention, prepare
from tests.kernels.naive_attention import PagedCase, paged_case

SCALE = 0.17
F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8
MIXED = ([1, 63, 2, 1, 100, 7, 1, 1], [100, 63, 111, 1, 163, 71, 33, 300])
"""Query and context lengths: decode rows, whole prompts, chunks, in any order."""


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN: an element that the kernel forgets shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))


def packed(case: PagedCase, dtype: torch.dtype | None = None) -> PagedCase:
    """The case over a packed cache, NaN in slots without a token; keys and values rounded as the cache holds them."""
    dtype = dtype or case.k_cache.dtype
    shape = (*case.k_cache.shape[1:3], vector_width(dtype, case.k_cache.shape[3]))
    memory = torch.full((case.k_cache.shape[0], 3, 2, *shape), float("nan")).to(dtype)
    case_k, case_v = view_keys(memory[:, 1, 0]), view_values(memory[:, 1, 1])
    pack_keys(case.k_cache, case_k)
    pack_values(case.v_cache, case_v)
    keys = [as_stored(each, dtype) for each in case.keys]
    values = [as_stored(each, dtype) for each in case.values]
    return PagedCase(case.query_lens, case.context_lens, case.query, keys, values, case_k, case_v, case.block_tables)


def as_stored(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codec.decode(*codec.encode(vectors, BF16), F32) if dtype == I8 else vectors.to(dtype)


def run(case: PagedCase, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
    batch = prepare(case.query_lens, case.context_lens, case.block_tables, case.k_cache)
    return paged_attention(case.query, case.k_cache, case.v_cache, batch, scale=SCALE, window=window, soft_cap=soft_cap)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


TOLERANCES = {(F32, F32): 2e-6, (F32, BF16): 2e-6, (BF16, BF16): 4e-3, (F32, I8): 2e-6, (BF16, I8): 4e-3}
"""By dtype of queries and cache: only the output of bfloat16 queries is rounded."""
SHAPES = [
    (heads, dim, block)
    for heads in ((4, 4), (9, 3), (8, 1))
    for dim, block in ((64, 16), (80, 8), (96, 32), (128, 128), (256, 64))
] + [((3, 1), 8, 16), ((6, 2), 24, 8), ((10, 2), 40, 12), ((7, 7), 64, 16), ((71, 1), 64, 16), ((2, 2), 64, 1024)]


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("dtypes", TOLERANCES, ids=str)
def test_rows_of_every_kind_equal_dense_attention(
    heads: tuple[int, int], head_dim: int, block_size: int, dtypes: tuple[torch.dtype, torch.dtype], native: Library
) -> None:
    case = packed(
        paged_case(
            *MIXED,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtypes[0],
        ),
        dtypes[1],
    )
    assert unpack_keys(case.k_cache).isnan().any() and unpack_values(case.v_cache).isnan().any()
    assert_close(run(case), case.expected(SCALE), TOLERANCES[dtypes])


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), SHAPES[::3])
def test_products_of_pairs_equal_dense_attention(
    heads: tuple[int, int], head_dim: int, block_size: int, native: Library
) -> None:
    """What CPUs with bfloat16 instructions run; elsewhere two products stand in for the instruction."""
    case = packed(
        paged_case(
            *MIXED, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size, dtype=BF16
        )
    )
    batch = prepare(case.query_lens, case.context_lens, case.block_tables, case.k_cache)
    assert isinstance(batch, native_attention.NativeBatch)
    out = native_attention.paged_attention(
        native, case.query, case.k_cache, case.v_cache, batch, scale=SCALE, pairs=True
    )
    assert_close(out, case.expected(SCALE), 5e-3)


@pytest.mark.parametrize("dtype", [F32, I8])
@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 8, 17, 64, 257, 1000])
def test_windows_and_soft_caps(window: int | None, soft_cap: float | None, dtype: torch.dtype, native: Library) -> None:
    """Rows shorter and longer than the window, windows that end within a split and skip whole splits."""
    case = packed(
        paged_case(
            [1, 63, 1, 30, 1], [100, 63, 700, 620, 513], num_heads=9, num_kv_heads=3, head_dim=32, block_size=16
        ),
        dtype,
    )
    assert_close(run(case, window, soft_cap), case.expected(SCALE, window, soft_cap), 3e-6)


def test_nan_of_one_row_stays_in_that_row(native: Library) -> None:
    case = packed(paged_case([1, 3, 1], [20, 40, 18], num_heads=3, num_kv_heads=1, head_dim=8, block_size=8))
    poisoned = int(case.block_tables[0, 0])
    case.k_cache[poisoned] = float("nan")
    case.v_cache[poisoned] = float("nan")
    out = run(case)
    assert out[0].isnan().all()
    assert_close(out[1:], case.expected(SCALE)[1:], 2e-6)


def test_scores_far_apart_and_equal_ones(native: Library) -> None:
    """One key outweighs all others by more than float32 can say; then all keys are the same."""
    case = packed(paged_case([1, 4], [300, 300], num_heads=2, num_kv_heads=2, head_dim=16, block_size=16))
    case.query *= 100
    assert_close(run(case), case.expected(SCALE), 3e-5)  # of scores up to 300, whose own rounding shows
    case.query *= 0
    assert_close(run(case), case.expected(SCALE), 2e-6)


# ------------------------------------------------------------------------------- the contract of the numbers

Part = tuple[int, int]
"""Queries (start, end) of one row."""


def run_parts(case: PagedCase, row: int, parts: list[Part]) -> torch.Tensor:
    """Attention of one row whose queries come in several steps, as chunked prefill and decode do it."""
    starts = np.cumsum(case.query_lens) - case.query_lens
    before = int(case.context_lens[row] - case.query_lens[row])
    outputs = []
    for start, end in parts:
        batch = prepare(
            np.array([end - start]), np.array([before + end]), case.block_tables[row : row + 1], case.k_cache
        )
        query = case.query[starts[row] + start : starts[row] + end]
        outputs.append(paged_attention(query, case.k_cache, case.v_cache, batch, scale=SCALE))
    return torch.cat(outputs)


def cut(length: int, size: int) -> list[Part]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


@pytest.mark.parametrize("dtypes", TOLERANCES, ids=str)
@pytest.mark.parametrize(("heads", "block_size"), [((9, 3), 16), ((4, 4), 8), ((8, 1), 48)])
def test_a_query_has_the_same_bits_alone_in_a_batch_and_in_any_chunk(
    heads: tuple[int, int], block_size: int, dtypes: tuple[torch.dtype, torch.dtype], native: Library
) -> None:
    lengths, contexts = [300, 1, 97, 1, 1, 64], [700, 700, 97, 5, 513, 256]
    case = packed(
        paged_case(
            lengths,
            contexts,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=64,
            block_size=block_size,
            dtype=dtypes[0],
        ),
        dtypes[1],
    )
    together = run(case).split(lengths)
    for row, length in enumerate(lengths):
        for size in (1, 7, 16, 17, 64, 300):
            assert torch.equal(run_parts(case, row, cut(length, size)), together[row]), f"row {row}, chunks of {size}"


def test_a_query_has_the_same_bits_on_any_number_of_threads(native: Library) -> None:
    """With more threads than rows the splits of a row are computed apart."""
    case = packed(
        paged_case([1, 40, 1], [1500, 900, 300], num_heads=9, num_kv_heads=3, head_dim=64, block_size=16), BF16
    )
    expected = run(case)
    for threads in (1, 3, 8):
        native.set_num_threads(threads)
        assert torch.equal(run(case), expected)
        assert torch.equal(run_parts(case, 0, [(0, 1)]), expected[:1])


# -------------------------------------------------------------------------------------------------- refusals

WRONG: dict[str, Callable[[PagedCase], torch.Tensor]] = {
    "too few heads": lambda case: case.query[:, :3],
    "other head_dim": lambda case: case.query[:, :, :4],
    "too many tokens": lambda case: case.query.repeat(2, 1, 1),
    "float64": lambda case: case.query.double(),
    "narrower than the cache": lambda case: case.query.bfloat16(),
    "float16": lambda case: case.query.half(),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_queries_are_refused(fault: str, native: Library) -> None:
    case = packed(paged_case([1], [15], num_heads=4, num_kv_heads=2, head_dim=8, block_size=8))
    batch = prepare(case.query_lens, case.context_lens, case.block_tables, case.k_cache)
    with pytest.raises(ValueError, match="paged_attention"):
        paged_attention(WRONG[fault](case), case.k_cache, case.v_cache, batch, scale=SCALE)
