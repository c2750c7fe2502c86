import pytest
import torch

from kernels.kv_layout.api import (
    are_scales_aligned,
    can_pack,
    holds_codes,
    is_packed,
    meets,
    pack_keys,
    pack_values,
    read_plain,
    run_shape,
    split_plain,
    unpack_keys,
    unpack_values,
    vector_width,
    view_keys,
    view_values,
    write_plain,
)
from kernels.kv_layout.codes import split

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


def test_codes_come_back_with_their_scales() -> None:
    """Scales lie behind the codes: nothing else of the memory is touched."""
    plain = memory(torch.float32)
    for view, pack, unpack in ((view_keys, pack_keys, unpack_keys), (view_values, pack_values, unpack_values)):
        whole = torch.zeros(4, 3, 2, 5, 6, vector_width(torch.int8, 10), dtype=torch.int8)
        packed = view(whole[:, 1, 0])
        assert is_packed(packed) and run_shape(packed) == (5, 6, 10)
        pack(plain, packed)
        largest = plain.abs().amax(-1, keepdim=True)
        assert ((unpack(packed) - plain).abs() <= largest / 127).all()
        codes, scales = split(whole[2, 1, 0, 3])
        token, dim = 4, 7
        code = codes[dim * 6 + token] if view is view_keys else codes[token * 10 + dim]
        assert unpack(packed)[2, 3, token, dim] == code.float() * scales[token].float()
        whole[:, 1, 0] = 0
        assert not whole.any()


@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_a_plain_run_of_codes_ends_with_its_scales(code: torch.dtype) -> None:
    """A token's codes lie side by side; whoever moves the run moves the scales."""
    whole = torch.zeros(4, 3, 2, 5, 6, vector_width(code, 10), dtype=torch.int8).view(code)
    cache, plain = whole[:, 1, 0], memory(torch.float32)
    assert not is_packed(cache) and run_shape(cache) == (5, 6, 10) and holds_codes(code)
    write_plain(plain, cache)
    step = {torch.int8: 1 / 127, torch.float8_e4m3fn: 2.0**-4}[code]
    assert ((read_plain(cache) - plain).abs() <= step * plain.abs().amax(-1, keepdim=True)).all()
    assert read_plain(cache, torch.bfloat16).dtype == torch.bfloat16
    run = whole[2, 1, 0, 3].flatten()
    token, dim = 4, 7
    scale = run[60:].view(torch.float16)[token]
    assert read_plain(cache)[2, 3, token, dim] == run[token * 10 + dim].float() * scale.float()
    whole.view(torch.int8)[:, 1, 0] = 0
    assert not whole.view(torch.int8).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_cache_of_numbers_is_what_kernels_take(dtype: torch.dtype) -> None:
    cache, plain = torch.zeros_like(memory(dtype)), memory(dtype)
    assert split_plain(cache) == (cache, None) and read_plain(cache) is cache
    write_plain(plain, cache)
    assert cache.equal(plain)


def test_which_numbers_meet_a_cache() -> None:
    f32, bf16, f16, i8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
    assert all(meets(*pair) for pair in ((f32, f32), (f32, bf16), (bf16, bf16), (f32, i8), (bf16, i8)))
    assert not any(meets(*pair) for pair in ((bf16, f32), (f16, i8), (i8, i8), (f16, f32)))


def test_a_view_is_the_same_memory() -> None:
    plain = memory(torch.bfloat16)
    view_keys(plain).zero_()
    assert not plain.any()


def test_which_runs_divide_into_words() -> None:
    assert can_pack(torch.float32, 7, 9) and can_pack(torch.bfloat16, 16, 80) and can_pack(torch.int8, 7, 64)
    for sizes in ((torch.bfloat16, 7, 8), (torch.bfloat16, 8, 7), (torch.float16, 16, 64), (torch.int8, 7, 9)):
        assert not can_pack(*sizes)
    assert are_scales_aligned(7, 64) and not are_scales_aligned(7, 9)
    with pytest.raises(ValueError, match="words"):
        view_values(memory(torch.bfloat16, block_size=7))
