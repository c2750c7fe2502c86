"""Triton attention, in the interpreter, against dense attention. NaN lies in unwritten slots and in the output."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.kv_layout.api import split_plain
from kernels.paged_attention import triton as attention
from kernels.paged_attention.gpu_batch import prepare
from tests.kernels.naive_attention import PagedCase, paged_case

SCALE = 0.17
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ODD_LENGTHS = [63, 100, 111, 1, 17]


CODES = pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])


def run(case: PagedCase, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
    (keys, k_scales), (values, v_scales) = split_plain(case.k_cache), split_plain(case.v_cache)
    layer = attention.Layer(keys, values, k_scales, v_scales, SCALE, window, soft_cap)
    batch = prepare(case.query_lens, case.context_lens, case.block_tables)
    out = torch.full_like(case.query, float("nan"))
    for launch in attention.launches(out, case.query, layer, batch):
        launch.run()
    return out


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (8, 4, 4, 24, torch.float32),
        (16, 9, 3, 64, torch.bfloat16),
        (16, 7, 1, 80, torch.float16),
        (24, 2, 2, 96, torch.float32),
        (32, 20, 1, 128, torch.float32),
        (64, 4, 4, 64, torch.float16),
        (128, 6, 2, 256, torch.bfloat16),
    ],
)
def test_decode_rows_and_chunks_equal_dense_attention(
    block_size: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    case = paged_case(
        [1, 63, 1, 1, 2],
        ODD_LENGTHS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    assert_close(run(case), case.expected(SCALE), TOLERANCE[dtype])


@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 17, 64])
def test_windows_and_soft_caps(window: int | None, soft_cap: float | None) -> None:
    """Rows shorter and longer than the window, chunks that begin before it and inside it."""
    case = paged_case([1, 5, 2, 1, 40], [100, 5, 111, 1, 103], num_heads=6, num_kv_heads=2, head_dim=16, block_size=16)
    assert_close(run(case, window, soft_cap), case.expected(SCALE, window, soft_cap))


@pytest.mark.parametrize("window", [None, 700])
def test_contexts_of_several_splits(window: int | None) -> None:
    """Decode folds partial results in a kernel of its own, prefill as it goes."""
    lengths = [attention.SPLIT, attention.SPLIT + 1, 2 * attention.SPLIT + 111]
    case = paged_case([1, 1, 1, 3, 9], [*lengths, 1100, 518], num_heads=2, num_kv_heads=1, head_dim=16, block_size=32)
    assert_close(run(case, window), case.expected(SCALE, window))


def test_one_program_may_compute_several_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = paged_case([1, 1], [1100, 600], num_heads=2, num_kv_heads=1, head_dim=16, block_size=32)
    many = run(case)
    monkeypatch.setattr(attention, "_MAX_SPLIT_PROGRAMS", 2)
    assert run(case).equal(many)


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    lengths = [100, 63, 600, 1, 111]
    case = paged_case([1, 7, 1, 1, 20], lengths, num_heads=6, num_kv_heads=2, head_dim=16, block_size=16)
    together = run(case)
    starts = np.cumsum(case.query_lens) - case.query_lens
    for row, start in enumerate(starts.tolist()):
        queries = slice(start, start + int(case.query_lens[row]))
        alone = replace(
            case,
            query_lens=case.query_lens[row : row + 1],
            context_lens=case.context_lens[row : row + 1],
            block_tables=case.block_tables[row : row + 1],
            query=case.query[queries],
        )
        assert run(alone).equal(together[queries])


def test_a_token_has_the_same_numbers_in_any_chunk_and_in_decode() -> None:
    """What a recompute relies on. Bit for bit as far as the interpreter's matrix products are."""
    case = paged_case([560], [560], num_heads=3, num_kv_heads=1, head_dim=16, block_size=16)
    whole = run(case)
    for first, last in ((0, 100), (100, 540), (540, 559), (559, 560)):
        part = replace(
            case,
            query_lens=np.array([last - first]),
            context_lens=np.array([last]),
            query=case.query[first:last],
        )
        torch.testing.assert_close(run(part), whole[first:last], rtol=2e-6, atol=1e-7)


@CODES
@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads", "head_dim", "dtype"),
    [
        (8, 4, 4, 40, torch.float32),
        (16, 6, 2, 64, torch.bfloat16),
        (24, 5, 1, 80, torch.float16),
        (32, 4, 2, 96, torch.float32),
        (64, 7, 1, 128, torch.bfloat16),
        (128, 2, 2, 256, torch.float16),
    ],
)
def test_a_cache_of_codes_equals_dense_attention_over_what_they_stand_for(
    block_size: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, code: torch.dtype
) -> None:
    """Decode and chunks; nothing reads what lies behind a context."""
    case = paged_case(
        [1, 5, 1],
        [100, 63, 17],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    ).coded(code)
    assert_close(run(case), case.expected(SCALE), TOLERANCE[dtype])


@CODES
@pytest.mark.parametrize(("window", "soft_cap"), [(17, None), (None, 0.5), (64, 0.5)])
def test_windows_and_soft_caps_over_codes(window: int | None, soft_cap: float | None, code: torch.dtype) -> None:
    case = paged_case([1, 5, 2, 40], [100, 5, 111, 103], num_heads=6, num_kv_heads=2, head_dim=16, block_size=16)
    coded = case.coded(code)
    assert_close(run(coded, window, soft_cap), coded.expected(SCALE, window, soft_cap))


@CODES
def test_codes_of_several_splits_have_the_same_bits_alone_in_a_batch_and_in_chunks(
    code: torch.dtype, same_products: None
) -> None:
    """The row of 600 tokens decodes in two splits, folded by a kernel of its own, or ends a chunk, which folds them."""
    case = paged_case([1, 9, 1], [600, 40, 17], num_heads=4, num_kv_heads=2, head_dim=16, block_size=16).coded(code)
    together = run(case)
    assert_close(together, case.expected(SCALE))
    chunk = replace(
        case,
        query_lens=np.array([4]),
        context_lens=np.array([600]),
        block_tables=case.block_tables[:1],
        query=case.query[:1].repeat(4, 1, 1),
    )
    alone = replace(chunk, query_lens=np.array([1]), query=case.query[:1])
    assert run(alone)[0].equal(together[0])
    assert run(chunk)[3].equal(together[0])


def test_a_row_without_context_gives_zeros() -> None:
    """Rows that pad a captured graph."""
    case = paged_case([1, 1], [20, 30], num_heads=3, num_kv_heads=1, head_dim=8, block_size=8)
    case.context_lens[1] = 0
    out = run(case)
    assert not out[1].any()
    assert_close(out[:1], case.expected(SCALE)[:1])


def test_nan_of_one_row_stays_in_that_row() -> None:
    case = paged_case([1, 3, 1], [20, 40, 18], num_heads=3, num_kv_heads=1, head_dim=8, block_size=8)
    poisoned = int(case.block_tables[0, 0])
    case.k_cache[poisoned] = float("nan")
    case.v_cache[poisoned] = float("nan")
    out = run(case)
    assert out[0].isnan().all()
    assert_close(out[1:], case.expected(SCALE)[1:])


def test_queries_of_a_fused_projection() -> None:
    case = paged_case([1, 5], [20, 40], num_heads=4, num_kv_heads=2, head_dim=8, block_size=8)
    fused = torch.full((6, 8, 8), float("nan"))
    fused[:, :4] = case.query
    case.query = fused[:, :4]
    assert_close(run(case), case.expected(SCALE))
