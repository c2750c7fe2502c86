import numpy as np
import pytest
import torch

from kernels.paged_attention.api import paged_attention, prepare
from tests.kernels.naive_attention import PagedCase, paged_case

SCALE = 0.17
ODD_LENGTHS = [63, 100, 111, 1, 17, 250]


def run(case: PagedCase, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
    batch = prepare(case.query_lens, case.context_lens, case.block_tables, case.k_cache)
    return paged_attention(case.query, case.k_cache, case.v_cache, batch, scale=SCALE, window=window, soft_cap=soft_cap)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (9, 3), (8, 1)], ids=["mha", "gqa3", "gqa8"])
def test_decode_rows_equal_dense_attention(block_size: int, num_heads: int, num_kv_heads: int) -> None:
    case = paged_case(
        [1] * len(ODD_LENGTHS),
        ODD_LENGTHS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=24,
        block_size=block_size,
    )
    assert_close(run(case), case.expected(SCALE))


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (9, 3), (8, 1)], ids=["mha", "gqa3", "gqa8"])
def test_chunks_and_decode_rows_mix_in_any_order(block_size: int, num_heads: int, num_kv_heads: int) -> None:
    case = paged_case(
        [1, 63, 2, 1, 100, 7, 1],
        [100, 63, 111, 1, 163, 71, 33],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        block_size=block_size,
    )
    assert_close(run(case), case.expected(SCALE))


@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 8, 17, 64, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (9, 3), (8, 1)], ids=["mha", "gqa3", "gqa8"])
def test_windows_and_soft_caps(num_heads: int, num_kv_heads: int, window: int | None, soft_cap: float | None) -> None:
    """Rows shorter and longer than the window, chunks that begin before it and inside it."""
    case = paged_case(
        [1, 63, 2, 1, 100, 7, 1],
        [100, 63, 111, 1, 163, 71, 33],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        block_size=16,
    )
    expected = case.expected(SCALE, window, soft_cap)
    assert_close(run(case, window, soft_cap), expected)
    if window == 8 or soft_cap is not None:
        assert (expected - case.expected(SCALE)).norm() > 0.1 * expected.norm(), "the case must tell them apart"


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (17, None), (None, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_a_plain_cache_of_codes_is_what_they_stand_for(
    code: torch.dtype, dtype: torch.dtype, window: int | None, soft_cap: float | None
) -> None:
    """What a GPU without Triton and a CPU without C++ kernels compute; unused slots are NaN."""
    case = paged_case(
        [1, 63, 2, 1], [100, 63, 111, 17], num_heads=6, num_kv_heads=2, head_dim=10, block_size=8, dtype=dtype
    ).coded(code)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    assert_close(run(case, window, soft_cap), case.expected(SCALE, window, soft_cap), tolerance)


def test_slots_before_the_window_reach_no_row() -> None:
    case = paged_case([1, 5, 1], [40, 40, 40], num_heads=3, num_kv_heads=1, head_dim=8, block_size=8)
    expected = case.expected(SCALE, 8)
    before = case.block_tables[:, :3].flatten().long()  # tokens 0 to 23; the earliest query sees 28 on
    case.k_cache[before], case.v_cache[before] = 1e4, 1e4
    assert_close(run(case, window=8), expected)


def test_nan_in_unused_slots_reaches_no_row() -> None:
    """The cache is NaN wherever nothing was written: the tail of last blocks, spare blocks, other layers."""
    case = paged_case([1, 5, 1], [9, 12, 31], num_heads=3, num_kv_heads=1, head_dim=8, block_size=16)
    assert case.k_cache.isnan().any()
    assert case.v_cache.isnan().any()
    assert run(case).isfinite().all()


def test_nan_of_one_row_stays_in_that_row() -> None:
    case = paged_case([1, 3, 1], [20, 40, 18], num_heads=3, num_kv_heads=1, head_dim=8, block_size=8)
    poisoned = int(case.block_tables[0, 0])
    case.k_cache[poisoned] = float("nan")
    case.v_cache[poisoned] = float("nan")
    out = run(case)
    assert out[0].isnan().all()
    assert_close(out[1:], case.expected(SCALE)[1:])


def test_a_row_has_the_same_numbers_alone_and_in_a_batch() -> None:
    """Bit for bit on the CPUs where it was measured; a last bit is allowed elsewhere."""
    lengths = [100, 63, 111, 97, 5, 700]
    case = paged_case([1] * 6, lengths, num_heads=9, num_kv_heads=3, head_dim=64, block_size=16)
    together = run(case)
    for row in range(6):
        batch = prepare(
            case.query_lens[:1], case.context_lens[row : row + 1], case.block_tables[row : row + 1], case.k_cache
        )
        alone = paged_attention(case.query[row : row + 1], case.k_cache, case.v_cache, batch, scale=SCALE)
        torch.testing.assert_close(alone[0], together[row], rtol=1e-6, atol=1e-7)


def test_bfloat16_is_close_to_dense_attention() -> None:
    case = paged_case(
        [1, 20, 1], [63, 100, 111], num_heads=9, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16
    )
    assert_close(run(case), case.expected(SCALE), tolerance=2e-2)


def test_table_narrower_than_the_padded_context() -> None:
    case = paged_case([1], [63], num_heads=2, num_kv_heads=1, head_dim=8, block_size=8)
    case.block_tables = case.block_tables[:, :8]
    assert_close(run(case), case.expected(SCALE))


@pytest.mark.parametrize(
    ("query_lens", "context_lens"), [([0], [5]), ([6], [5]), ([1], [33]), ([1, 1], [5, 5]), ([1], [5, 5])]
)
def test_impossible_lengths_are_refused(query_lens: list[int], context_lens: list[int]) -> None:
    case = paged_case([1], [15], num_heads=2, num_kv_heads=1, head_dim=8, block_size=8)
    with pytest.raises(ValueError, match="prepare"):
        prepare(np.array(query_lens), np.array(context_lens), case.block_tables, case.k_cache)


def test_wrong_shapes_are_refused() -> None:
    case = paged_case([1], [15], num_heads=4, num_kv_heads=2, head_dim=8, block_size=8)
    batch = prepare(case.query_lens, case.context_lens, case.block_tables, case.k_cache)
    for query in (case.query[:, :3], case.query[:, :, :4], case.query.repeat(2, 1, 1), case.query.double()):
        with pytest.raises(ValueError, match="paged_attention"):
            paged_attention(query, case.k_cache, case.v_cache, batch, scale=SCALE)


@pytest.mark.parametrize("options", [{"window": 0}, {"window": -1}, {"soft_cap": 0.0}, {"soft_cap": -1.0}])
def test_windows_and_caps_out_of_range_are_refused(options: dict) -> None:
    case = paged_case([1], [15], num_heads=4, num_kv_heads=2, head_dim=8, block_size=8)
    batch = prepare(case.query_lens, case.context_lens, case.block_tables, case.k_cache)
    with pytest.raises(ValueError, match=r"window|soft cap"):
        paged_attention(case.query, case.k_cache, case.v_cache, batch, scale=SCALE, **options)
