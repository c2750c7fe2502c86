import pytest
import torch

from kernels.kv_layout.api import (
    can_pack,
    is_packed,
    pack_keys,
    pack_values,
    run_shape,
    unpack_keys,
    unpack_values,
    view_keys,
    view_values,
)

DTYPES = [torch.float32, torch.bfloat16]


def memory(dtype: torch.dtype, block_size: int = 6, head_dim: int = 10) -> torch.Tensor:
    """One layer within a block-major cache: blocks are not neighbours."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 2, 5, block_size, head_dim, generator=generator).to(dtype)[:, 1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_packed_comes_back(dtype: torch.dtype) -> None:
    plain = memory(dtype)
    for view, pack, unpack in ((view_keys, pack_keys, unpack_keys), (view_values, pack_values, unpack_values)):
        packed = view(torch.zeros_like(plain))
        pack(plain, packed)
        assert is_packed(packed) and not is_packed(plain)
        assert unpack(packed).equal(plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_word_holds_neighbours(dtype: torch.dtype) -> None:
    """Keys: dimensions of a token, tokens side by side. Values: tokens of a dimension, dimensions side by side."""
    plain, group = memory(dtype), 4 // dtype.itemsize
    keys, values = view_keys(torch.zeros_like(plain)), view_values(torch.zeros_like(plain))
    pack_keys(plain, keys)
    pack_values(plain, values)
    for token, dim in ((0, 0), (5, 3), (4, 9)):
        assert keys[2, 3, dim // group, token, dim % group] == plain[2, 3, token, dim]
        assert values[2, 3, token // group, dim, token % group] == plain[2, 3, token, dim]
    assert run_shape(keys) == run_shape(plain) == (5, 6, 10)


def test_a_view_is_the_same_memory() -> None:
    plain = memory(torch.bfloat16)
    view_keys(plain).zero_()
    assert not plain.any()


def test_which_runs_divide_into_words() -> None:
    assert can_pack(torch.float32, 7, 9) and can_pack(torch.bfloat16, 16, 80)
    for sizes in ((torch.bfloat16, 7, 8), (torch.bfloat16, 8, 7), (torch.float16, 16, 64), (torch.int8, 16, 64)):
        assert not can_pack(*sizes)
    with pytest.raises(ValueError, match="words"):
        view_values(memory(torch.bfloat16, block_size=7))
