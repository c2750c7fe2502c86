"""The small Triton kernels, in the interpreter, against the torch references; outputs are NaN before."""

import numpy as np
import pytest
import torch

from kernels.block_copy import triton as block_copy
from kernels.cache_write import reference
from kernels.cache_write import triton as cache_write
from kernels.cache_write.api import HeadNorms
from kernels.gated import reference as gated_reference
from kernels.gated import triton as gated
from kernels.kv_codec import reference as codec
from kernels.kv_layout.api import split_plain, vector_width
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rms_norm import triton as rms_norm
from kernels.rope.api import rope, rope_tables

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""The interpreter truncates to bfloat16, which is twice the error of rounding."""
CODES = pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = ROUNDING[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [63, 100, 1111])
def test_rms_norm(hidden: int, dtype: torch.dtype, wide_weight: bool) -> None:
    rows = poisoned(7, 2 * hidden, dtype=dtype)
    rows[:, :hidden] = random(7, hidden).to(dtype)
    x, weight = rows[:, :hidden], random(hidden, seed=1).to(torch.float32 if wide_weight else dtype)
    out = poisoned(7, hidden, dtype=dtype)
    rms_norm.launch(out, x, weight, 1e-5).run()
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert_close(out, wide * scale * weight.float())
    if not wide_weight:
        assert_close(out, rms_norm_reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 111, 1500])
def test_gated_activations(width: int, dtype: torch.dtype, is_gelu: bool) -> None:
    gate_up = (random(3, 2 * width) * 4).to(dtype)
    out = poisoned(3, width, dtype=dtype)
    gated.launch(out, gate_up, is_gelu=is_gelu).run()
    reference = gated_reference.gelu_mul if is_gelu else gated_reference.silu_mul
    assert_close(out, reference(gate_up))


@pytest.mark.parametrize("size", [1, 7, 63, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_block_copy(dtype: torch.dtype, size: int) -> None:
    """Blocks whose bytes divide by 8, by 4, by 2 and by none of them; a source may have several destinations."""
    source, destination = ((random(9, 1, size, seed=seed) * 50).to(dtype) for seed in (0, 1))
    pairs = np.array([(3, 0), (3, 8), (0, 4), (8, 1)])
    expected = destination.clone()
    expected[pairs[:, 1]] = source[pairs[:, 0]]
    block_copy.copy_pairs(source, destination, pairs)
    assert destination.equal(expected)


def rotation(head_dim: int, num_tokens: int) -> cache_write.Rotation:
    frequencies = 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    positions = torch.tensor([0, 1, 63, 100, 111, 299])[:num_tokens]
    return cache_write.Rotation(*rope_tables(positions, frequencies, torch.float32))


def turned(x: torch.Tensor, by: cache_write.Rotation) -> torch.Tensor:
    """In float32, by the reference."""
    return rope(x.float(), by.cos, by.sin)


SLOTS = torch.tensor([47, 0, -1, 13, 8, 24])
WRITTEN = SLOTS >= 0


def layers(num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int = 8) -> torch.Tensor:
    """Of 48 slots or more."""
    return torch.zeros(-(-48 // block_size), 3, 2, num_kv_heads, block_size, head_dim).to(dtype)


def at_slots(cache: torch.Tensor) -> torch.Tensor:
    block_size = cache.shape[2]
    return cache.transpose(1, 2)[SLOTS[WRITTEN] // block_size, SLOTS[WRITTEN] % block_size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary", "block_size"),
    [
        (4, 4, 24, 24, 8),
        (9, 3, 64, 64, 16),
        (7, 1, 80, 32, 24),
        (20, 2, 96, 96, 32),
        (8, 4, 128, 128, 64),
        (33, 3, 256, 256, 128),
    ],
)
def test_cache_write_with_rotation(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary: int, block_size: int, dtype: torch.dtype
) -> None:
    """A fused projection of six tokens, one of which has no slot, into one layer of three."""
    fused = random(6, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), 1)
    memory = layers(num_kv_heads, head_dim, dtype, block_size)
    k_cache, v_cache = memory[:, 1, 0], memory[:, 1, 1]
    by, out = rotation(rotary, 6), poisoned(6, num_heads, head_dim, dtype=dtype)
    cache_write.launch(out, query, key, value, cache_write.Slots(k_cache, v_cache, None, None, SLOTS), by, None).run()
    assert_close(out, turned(query, by))
    assert_close(at_slots(k_cache), turned(key, by)[WRITTEN])
    assert at_slots(v_cache).equal(value[WRITTEN])
    assert int((memory != 0).sum()) == 2 * int(WRITTEN.sum()) * num_kv_heads * head_dim, "nothing else is written"


def test_cache_write_without_queries_and_rotation() -> None:
    key, value = random(6, 3, 24), random(6, 3, 24, seed=1)
    memory = layers(3, 24, torch.float32)
    slots = cache_write.Slots(memory[:, 1, 0], memory[:, 1, 1], None, None, SLOTS)
    assert cache_write.cache_write(key[:, :0], key, value, slots).shape == (6, 0, 24)
    assert at_slots(memory[:, 1, 0]).equal(key[WRITTEN]) and at_slots(memory[:, 1, 1]).equal(value[WRITTEN])


def test_cache_write_with_head_norms() -> None:
    query, key, value = random(6, 5, 24), random(6, 2, 24, seed=1), random(6, 2, 24, seed=2)
    norms = HeadNorms(random(24, seed=3), random(24, seed=4), 1e-6)
    memory = layers(2, 24, torch.float32)
    slots = cache_write.Slots(memory[:, 1, 0], memory[:, 1, 1], None, None, SLOTS)
    by = rotation(24, 6)
    out = cache_write.cache_write(query, key, value, slots, by, norms)
    for x, weight, actual in ((query, norms.query, out[WRITTEN]), (key, norms.key, at_slots(memory[:, 1, 0]))):
        normed = rms_norm_reference.rms_norm(x.reshape(-1, 24), weight, 1e-6).view(x.shape)
        assert_close(actual, turned(normed, by)[WRITTEN])
    assert at_slots(memory[:, 1, 1]).equal(value[WRITTEN])


def coded_layers(num_kv_heads: int, head_dim: int, code: torch.dtype, block_size: int = 8) -> torch.Tensor:
    """Codes and scales as a cache of three layers holds them, all bytes zero."""
    return layers(num_kv_heads, vector_width(code, head_dim), torch.int8, block_size).view(code)


def stored_at_slots(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as numbers and their scales."""
    codes, scales = split_plain(cache)
    assert scales is not None
    return at_slots(codes).float(), at_slots(scales)


@CODES
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_cache_write_of_codes_equals_the_codec(size: float, code: torch.dtype) -> None:
    """Outliers, zeros, and NaN, which stays in its own vector. Neighbours in memory stay as they are."""
    key, value = random(6, 3, 40) * size, random(6, 3, 40, seed=1) * size * random(6, 3, 1, seed=2).exp()
    key[0, 0] = 0
    value[1, 2, 7] = float("nan")
    memory = coded_layers(3, 40, code)
    k_cache, v_cache = memory[:, 1, 0], memory[:, 1, 1]
    cache_write.cache_write(key[:, :0], key, value, cache_write.slots(k_cache, v_cache, SLOTS))
    for x, cache in ((key, k_cache), (value, v_cache)):
        codes, scales = stored_at_slots(cache)
        expected_codes, expected_scales = codec.encode(x[WRITTEN], torch.float16, code)
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
        assert codes.equal(expected_codes.float())
    again = coded_layers(3, 40, code)
    reference.cache_write(
        key[WRITTEN], value[WRITTEN], split_plain(again[:, 1, 0]), split_plain(again[:, 1, 1]), SLOTS[WRITTEN]
    )
    assert memory.view(torch.int8).equal(again.view(torch.int8)), "nothing else is written"


@CODES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary", "block_size"),
    [(9, 3, 64, 64, 8), (7, 1, 80, 32, 16), (4, 2, 96, 96, 24), (8, 4, 128, 128, 64), (2, 2, 256, 256, 128)],
)
def test_cache_write_of_codes_with_rotation_and_head_norms(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary: int, block_size: int, code: torch.dtype
) -> None:
    """The codes of what a cache of numbers is given."""
    fused = random(6, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), 1)
    norms = HeadNorms(random(head_dim, seed=3), random(head_dim, seed=4), 1e-6)
    by, exact = rotation(rotary, 6), layers(num_kv_heads, head_dim, torch.float32, block_size)
    memory = coded_layers(num_kv_heads, head_dim, code, block_size)
    outs = [
        cache_write.cache_write(query, key, value, cache_write.slots(cache[:, 1, 0], cache[:, 1, 1], SLOTS), by, norms)
        for cache in (exact, memory)
    ]
    assert outs[0].equal(outs[1])
    for at in range(2):
        codes, scales = stored_at_slots(memory[:, 1, at])
        numbers = at_slots(exact[:, 1, at])
        expected_codes, expected_scales = codec.encode(numbers, torch.float16, code)
        assert scales.equal(expected_scales) and codes.equal(expected_codes.float())


def test_every_number_becomes_the_nearest_code() -> None:
    """All fp8 codes, the middles between them and numbers beside these: rounding is to the nearest, ties to even."""
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    numbers = torch.cat((codes, middles, middles * (1 + 2e-7), middles * (1 - 2e-7), torch.full((1,), 448.0)))
    rows = torch.nn.functional.pad(numbers, (0, -len(numbers) % 32)).view(-1, 1, 32)
    rows[..., -1] = 448.0  # so that every scale is 1
    key = torch.cat((rows, -rows))
    memory = torch.zeros(4, 2, 1, 8, vector_width(torch.float8_e4m3fn, 32), dtype=torch.int8).view(torch.float8_e4m3fn)
    k_cache, v_cache = memory[:, 0], memory[:, 1]
    cache_write.cache_write(key[:, :0], key, key, cache_write.slots(k_cache, v_cache, torch.arange(len(key))))
    stored = split_plain(k_cache)[0].transpose(1, 2).reshape(-1, 1, 32)[: len(key)].float()
    assert stored.equal(key.to(torch.float8_e4m3fn).float())


@CODES
def test_block_copy_moves_codes_and_scales_together(code: torch.dtype) -> None:
    """Runs of 8 x 42 bytes and of 3 x 22, which divide by no larger word than two bytes."""
    for block_size, head_dim in ((8, 40), (3, 20)):
        width = vector_width(code, head_dim)
        source = torch.randint(-128, 128, (9, 1, 2, 3, block_size, width), dtype=torch.int8).view(code)
        destination = torch.zeros(source.shape, dtype=torch.int8).view(code)
        pairs = np.array([(3, 0), (3, 8), (0, 4), (8, 1)])
        block_copy.copy_pairs(source, destination, pairs)
        moved, expected = destination.view(torch.int8), torch.zeros(source.shape, dtype=torch.int8)
        expected[pairs[:, 1]] = source.view(torch.int8)[pairs[:, 0]]
        assert moved.equal(expected)
