import math

import pytest
import torch

from kernels.cache_write.api import HeadNorms, cache_write, rope_cache_write
from kernels.gated.api import gelu_mul, silu_mul
from kernels.rms_norm.api import rms_norm
from kernels.rope.api import rope, rope_tables


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_its_definition(dtype: torch.dtype) -> None:
    x, weight = random(7, 63).to(dtype), random(63, seed=1).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=tolerance, atol=tolerance)


def test_a_float32_weight_is_applied_before_the_only_rounding() -> None:
    x, weight = random(7, 63).bfloat16(), random(63, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    actual = rms_norm(x, weight, 1e-5)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=0)
    assert not torch.equal(actual, rms_norm(x, weight.bfloat16(), 1e-5)), "rounding twice gives other numbers"


def test_gelu_mul_equals_its_definition() -> None:
    gate_up = random(5, 2 * 111)
    gate, up = gate_up[:, :111].double(), gate_up[:, 111:].double()
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_mul(gate_up).double(), gate * (1 + inner.tanh()) / 2 * up, rtol=1e-5, atol=1e-6)


def test_silu_mul_equals_its_definition() -> None:
    gate_up = random(5, 2 * 111)
    gate, up = gate_up[:, :111].double(), gate_up[:, 111:].double()
    torch.testing.assert_close(silu_mul(gate_up).double(), gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-6)


def test_rope_rotates_each_pair_by_its_angle() -> None:
    """Pairs (i, i + d/2) as complex numbers, turned by position * frequency."""
    x, positions = random(4, 3, 10), torch.tensor([0, 1, 63, 8191])
    frequencies = 10000.0 ** -(torch.arange(5) / 5)
    turned = torch.complex(x[..., :5].double(), x[..., 5:].double()) * torch.polar(
        torch.ones(4, 1, 5, dtype=torch.float64), (positions.float()[:, None] * frequencies).double()[:, None]
    )
    actual = rope(x, *rope_tables(positions, frequencies, torch.float32))
    torch.testing.assert_close(actual.double(), torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-5)


def test_tables_narrower_than_the_head_rotate_its_first_dimensions() -> None:
    x, positions, frequencies = random(4, 3, 16), torch.tensor([0, 1, 63, 8191]), torch.tensor([1.0, 0.1, 0.01])
    tables = rope_tables(positions, frequencies, torch.float32, scale=1.5)
    actual = rope(x, *tables)
    assert torch.equal(actual[..., 6:], x[..., 6:])
    assert torch.equal(actual[..., :6], rope(x[..., :6].contiguous(), *tables))
    torch.testing.assert_close(actual[0, :, :6], 1.5 * x[0, :, :6])


def test_cache_write_changes_the_named_slots_and_nothing_else() -> None:
    layers = torch.zeros(6, 2, 2, 3, 8, 4)
    k_cache, v_cache = layers[:, 1, 0], layers[:, 1, 1]
    slots = torch.tensor([47, 0, 13, 8, 24])
    key, value = random(5, 3, 4), random(5, 3, 4, seed=1)
    cache_write(key, value, k_cache, v_cache, slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(k_cache[slot // 8, :, slot % 8], key[i])
        assert torch.equal(v_cache[slot // 8, :, slot % 8], value[i])
    assert int((layers != 0).sum()) == 2 * key.numel()


def test_cache_write_takes_slices_of_a_fused_projection() -> None:
    fused = random(5, 9, 4)
    k_cache, v_cache = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)
    cache_write(fused[:, 3:6], fused[:, 6:], k_cache, v_cache, torch.arange(5))
    assert torch.equal(k_cache.transpose(1, 2).reshape(8, 3, 4)[:5], fused[:, 3:6])
    assert torch.equal(v_cache.transpose(1, 2).reshape(8, 3, 4)[:5], fused[:, 6:])


@pytest.mark.parametrize(
    "call",
    [
        lambda: rms_norm(random(2, 8), random(7), 1e-5),
        lambda: rms_norm(random(2, 8), random(8).bfloat16(), 1e-5),
        lambda: silu_mul(random(2, 7)),
        lambda: gelu_mul(random(2, 7)),
        lambda: rope(random(2, 3, 8), random(2, 10), random(2, 10)),
        lambda: rope(random(2, 3, 8), random(2, 5), random(2, 5)),
        lambda: rope(random(2, 3, 8), random(2, 8), random(2, 6)),
        lambda: rope(random(2, 3, 8), random(3, 8), random(3, 8)),
        lambda: cache_write(random(2, 3, 4), random(2, 3, 4), random(2, 2, 8, 4), random(2, 2, 8, 4), torch.arange(2)),
        lambda: cache_write(random(2, 3, 4), random(2, 3, 4), random(2, 3, 8, 4), random(2, 3, 8, 4), torch.arange(3)),
        lambda: cache_write(
            random(2, 3, 4), random(2, 3, 4), random(2, 3, 8, 4), random(2, 3, 8, 4), torch.arange(2).int()
        ),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(call) -> None:
    with pytest.raises(ValueError, match=r"rms_norm|gated|rope|cache_write"):
        call()


@pytest.mark.parametrize("with_norms", [False, True])
def test_rope_cache_write_is_norm_rotation_and_write_in_turn(with_norms: bool) -> None:
    heads, weights = random(5, 7, 12), (random(12, seed=1), random(12, seed=2))
    tables = rope_tables(torch.tensor([0, 1, 63, 100, 8191]), 10000.0 ** -(torch.arange(4) / 4), torch.float32)
    k_cache, v_cache = torch.zeros(2, 2, 4, 12), torch.zeros(2, 2, 4, 12)
    norms = HeadNorms(*weights, 1e-6) if with_norms else None
    query = rope_cache_write(heads, *tables, k_cache, v_cache, torch.arange(1, 6), norms=norms)
    parts = [heads[:, :3], heads[:, 3:5]]
    if with_norms:
        parts = [
            rms_norm(part.reshape(-1, 12), weight, 1e-6).view(part.shape)
            for part, weight in zip(parts, weights, strict=True)
        ]
    assert query.equal(rope(parts[0], *tables))
    assert k_cache.transpose(1, 2).reshape(8, 2, 12)[1:6].equal(rope(parts[1], *tables))
    assert v_cache.transpose(1, 2).reshape(8, 2, 12)[1:6].equal(heads[:, 5:])


def test_rope_cache_write_refuses_tables_of_other_tokens() -> None:
    cache = torch.zeros(2, 2, 4, 12)
    with pytest.raises(ValueError, match="rope_cache_write"):
        rope_cache_write(random(5, 7, 12), random(4, 12), random(4, 12), cache, cache, torch.arange(5))
