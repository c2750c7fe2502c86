"""RMSNorm, gated activations, and the cache write with rotation by the C++ kernels, at every dispatch level here."""

import math

import pytest
import torch

from kernels.cache_write.native import HeadNorms, Rotation, rope_cache_write
from kernels.gated.native import Gate, gated
from kernels.kv_codec import reference as codec
from kernels.kv_layout.api import unpack_keys, unpack_values, vector_width, view_keys, view_values
from kernels.native.library import Library
from kernels.rms_norm.native import rms_norm
from kernels.rope.api import rope_tables
from kernels.rope.reference import rope

F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8
ROUNDING = {F32: 2e-6, BF16: 2.0**-8}
"""Largest relative error of one rounding and the sums before it."""


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(float("nan")))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("hidden", [1, 15, 64, 111, 576])
@pytest.mark.parametrize("rows", [1, 7, 63])
def test_rms_norm_equals_its_definition(rows: int, hidden: int, dtype: torch.dtype, native: Library) -> None:
    x, weight = random(rows, hidden).to(dtype), random(hidden, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(native, x, weight, 1e-5).double(), expected, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rms_norm_of_a_sum_normalises_the_residual_as_it_is_stored(dtype: torch.dtype, native: Library) -> None:
    x, residual, weight = random(9, 100).to(dtype), random(9, 100, seed=1).to(dtype), random(100, seed=2)
    total = x + residual
    out = rms_norm(native, x, weight, 1e-5, residual)
    assert torch.equal(residual, total)
    assert torch.equal(out, rms_norm(native, total, weight, 1e-5))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("gate", Gate)
def test_gated_activations_equal_their_definitions(gate: Gate, dtype: torch.dtype, native: Library) -> None:
    gate_up = (random(5, 2 * 111) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-90.0, 90.0, -1e30, 1e30])
    x, up = gate_up[:, :111].double(), gate_up[:, 111:].double()
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    expected = (x * x.sigmoid() if gate is Gate.SILU else x * (1 + inner.tanh()) / 2) * up
    torch.testing.assert_close(gated(native, gate_up, gate).double(), expected, rtol=ROUNDING[dtype], atol=4e-6)


# ----------------------------------------------------------------------------------------------- cache write


def written(
    dtype: torch.dtype, cache_dtype: torch.dtype, heads: tuple[int, int], dim: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A fused projection of 21 tokens, an empty packed cache of one layer among others, slots in no order."""
    fused = random(21, heads[0] + 2 * heads[1], dim).to(dtype)
    width = vector_width(cache_dtype, dim)
    memory = torch.full((9, 3, 2, heads[1], block_size, width), float("nan")).to(cache_dtype)
    if cache_dtype == I8:
        memory.fill_(-1)  # as bfloat16, which scales are, not a number
    slots = torch.randperm(9 * block_size, generator=torch.Generator().manual_seed(1))[:21]
    return fused, view_keys(memory[:, 1, 0]), view_values(memory[:, 1, 1]), slots


def at_slots(plain: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[num_blocks, kv_heads, block_size, head_dim] -> [tokens, kv_heads, head_dim]."""
    return plain[slots // plain.shape[2], :, slots % plain.shape[2]]


def as_stored(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What comes back from a cache."""
    return codec.decode(*codec.encode(vectors, BF16), F32) if dtype == I8 else vectors.to(dtype)


DTYPES = [(F32, F32), (F32, BF16), (BF16, BF16), (F32, I8), (BF16, I8)]


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "block_size"), [((9, 3), 64, 16), ((2, 2), 10, 8), ((8, 1), 80, 32)])
def test_without_rotation_slots_hold_what_was_projected_and_others_are_untouched(
    dtypes: tuple[torch.dtype, torch.dtype], heads: tuple[int, int], dim: int, block_size: int, native: Library
) -> None:
    fused, keys, values, slots = written(*dtypes, heads, dim, block_size)
    q, k, v = fused.split((heads[0], heads[1], heads[1]), 1)
    assert torch.equal(rope_cache_write(native, q, k, v, keys, values, slots), q)
    for packed, unpack, source in ((keys, unpack_keys, k), (values, unpack_values, v)):
        plain = unpack(packed)
        assert torch.equal(at_slots(plain, slots), as_stored(source, dtypes[1]))
        assert int((~plain.isnan()).sum()) == source.numel()


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rotary", [4, 20, 64])
@pytest.mark.parametrize("with_norms", [False, True])
def test_queries_and_keys_are_rotated_as_in_torch(
    with_norms: bool, rotary: int, dtypes: tuple[torch.dtype, torch.dtype], native: Library
) -> None:
    fused, keys, values, slots = written(*dtypes, (9, 3), 64, 16)
    q, k, v = fused.split((9, 3, 3), 1)
    frequencies = 10000.0 ** -(torch.arange(rotary // 2) / (rotary // 2))
    positions = torch.randint(0, 900, (21,), generator=torch.Generator().manual_seed(2))
    angles = torch.arange(900.0)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), 1)
    norms = HeadNorms(random(64, seed=3), random(64, seed=4), 1e-6) if with_norms else None

    out = rope_cache_write(native, q, k, v, keys, values, slots, rotation=Rotation(table, positions), norms=norms)

    tables = rope_tables(positions, frequencies, F32)
    for actual, source, weight in (
        (out, q, norms and norms.query),
        (at_slots(unpack_keys(keys), slots), k, norms and norms.key),
    ):
        wide = source.float()
        if weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight
        expected = torch.cat((rope(wide[..., :rotary], *tables), wide[..., rotary:]), -1)
        tolerance = ROUNDING[actual.dtype]
        step = expected.abs().amax() / 127 if dtypes[1] == I8 and actual is not out else 4e-6
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=float(step))
    assert torch.equal(at_slots(unpack_values(values), slots), as_stored(v, dtypes[1]))


def test_codes_of_zeros_of_tiny_numbers_and_of_what_is_not_finite(native: Library) -> None:
    _, keys, values, _ = written(F32, I8, (2, 2), 24, 8)
    source = random(6, 2, 24)
    source[0], source[1], source[2] = 0.0, 1e-38, 1e30
    source[3, 0, 5], source[4, 1, 7] = torch.nan, -torch.inf
    slots = torch.tensor([7, 3, 30, 31, 64, 1])
    rope_cache_write(native, None, source, source, keys, values, slots)
    for plain in (unpack_keys(keys), unpack_values(values)):
        found = at_slots(plain, slots)
        assert found[3, 0].isnan().all() and found[4, 1].isnan().all()
        fine = torch.ones(6, 2, dtype=torch.bool)
        fine[3, 0] = fine[4, 1] = False
        assert torch.equal(found[fine], as_stored(source, I8)[fine])


def test_neighbouring_tokens_of_one_word_are_written_by_different_threads_unharmed(native: Library) -> None:
    """A word of V holds two tokens, and chunks of work may end between them."""
    memory = torch.zeros(2, 1, 64, 16, dtype=BF16)
    keys, values = view_keys(memory), view_values(torch.zeros_like(memory))
    source = random(101, 1, 16).to(BF16)
    slots = torch.arange(3, 104)
    for _ in range(20):
        values.zero_()
        rope_cache_write(native, None, source, source, keys, values, slots)
        assert torch.equal(at_slots(unpack_values(values), slots), source)
