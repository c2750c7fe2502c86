"""Triton attention over any shape, in the interpreter; hundreds of examples with `make test-property`."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_attention import triton as attention
from kernels.paged_attention.gpu_batch import prepare
from tests.kernels.naive_attention import paged_case

EXAMPLES = max(6, settings().max_examples // 20)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SCALE = 0.17

rows = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 130)), min_size=1, max_size=3)


@settings(max_examples=EXAMPLES)
@given(
    rows=rows,
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([8, 24, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([8, 16, 24, 32, 64, 128]),
    dtype=st.sampled_from(list(TOLERANCE)),
    window=st.none() | st.integers(1, 150),
    soft_cap=st.none() | st.floats(0.2, 50.0),
)
def test_attention_equals_its_definition(
    rows: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
) -> None:
    case = paged_case(
        [new for new, _ in rows],
        [new + before for new, before in rows],
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    layer = attention.Layer(case.k_cache, case.v_cache, None, None, SCALE, window, soft_cap)
    out = torch.full_like(case.query, float("nan"))
    for launch in attention.launches(
        out, case.query, layer, prepare(case.query_lens, case.context_lens, case.block_tables)
    ):
        launch.run()
    expected = case.expected(SCALE, window, soft_cap)
    assert (out.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()


def test_every_row_is_a_single_or_a_chunk() -> None:
    batch = prepare(np.array([1, 5, 1, 2]), np.array([9, 5, 1, 8]), torch.zeros(4, 2, dtype=torch.int32))
    assert batch.singles.tolist() == [0, 2] and batch.chunks.tolist() == [1, 3]
    assert (batch.num_tokens, batch.longest_context, batch.longest_chunk) == (9, 9, 5)
    assert batch.query_starts.tolist() == [0, 1, 6, 7]
