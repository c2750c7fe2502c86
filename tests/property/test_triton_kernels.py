"""Triton attention over any shape, in the interpreter; hundreds of examples with `make test-property`."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cache_write import triton as cache_write
from kernels.kv_layout.api import read_plain, split_plain, vector_width, write_plain
from kernels.paged_attention import triton as attention
from kernels.paged_attention.gpu_batch import prepare
from tests.kernels.naive_attention import paged_case

EXAMPLES = max(6, settings().max_examples // 20)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SCALE = 0.17

codes = st.sampled_from([None, torch.int8, torch.float8_e4m3fn])
"""What the cache holds; None: the dtype of the queries."""
rows = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 130)), min_size=1, max_size=3)


@settings(max_examples=EXAMPLES)
@given(
    rows=rows,
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([8, 24, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([8, 16, 24, 32, 64, 128]),
    dtype=st.sampled_from(list(TOLERANCE)),
    code=codes,
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
    code: torch.dtype | None,
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
    case = case if code is None else case.coded(code)
    (keys, k_scales), (values, v_scales) = split_plain(case.k_cache), split_plain(case.v_cache)
    layer = attention.Layer(keys, values, k_scales, v_scales, SCALE, window, soft_cap)
    out = torch.full_like(case.query, float("nan"))
    for launch in attention.launches(
        out, case.query, layer, prepare(case.query_lens, case.context_lens, case.block_tables)
    ):
        launch.run()
    expected = case.expected(SCALE, window, soft_cap)
    assert (out.double() - expected).norm() < TOLERANCE[dtype] * expected.norm()


@settings(max_examples=EXAMPLES)
@given(
    num_tokens=st.integers(1, 9),
    num_kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([8, 24, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([8, 16, 24, 32, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    code=codes,
    seed=st.integers(0, 99),
)
def test_what_is_written_is_what_the_codec_makes_of_it_and_nothing_else(
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    code: torch.dtype | None,
    seed: int,
) -> None:
    """Any slots of blocks in any number, every third of them none."""
    draw = torch.Generator().manual_seed(seed)
    held = dtype if code is None else code
    shape = (3, 2, 2, num_kv_heads, block_size, vector_width(held, head_dim))
    memory = torch.zeros(shape, dtype=torch.int8 if code else dtype).view(held)
    key, value = (torch.randn(num_tokens, num_kv_heads, head_dim, generator=draw).to(dtype) for _ in range(2))
    slots = torch.randperm(3 * block_size, generator=draw)[:num_tokens]
    slots[::3] = -1
    cache_write.cache_write(key[:, :0], key, value, cache_write.slots(memory[:, 1, 0], memory[:, 1, 1], slots))
    expected = torch.zeros(3, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    for token in np.flatnonzero(slots.numpy() >= 0):
        block, offset = divmod(int(slots[token]), block_size)
        expected[block, 1, 0, :, offset], expected[block, 1, 1, :, offset] = key[token], value[token]
    whole = torch.zeros(shape, dtype=torch.int8 if code else dtype).view(held)
    write_plain(expected, whole)
    assert memory.view(torch.uint8).equal(whole.view(torch.uint8))
    assert read_plain(memory, dtype).shape == expected.shape


def test_every_row_is_a_single_or_a_chunk() -> None:
    batch = prepare(np.array([1, 5, 1, 2]), np.array([9, 5, 1, 8]), torch.zeros(4, 2, dtype=torch.int32))
    assert batch.singles.tolist() == [0, 2] and batch.chunks.tolist() == [1, 3]
    assert (batch.num_tokens, batch.longest_context, batch.longest_chunk) == (9, 9, 5)
    assert batch.query_starts.tolist() == [0, 1, 6, 7]
