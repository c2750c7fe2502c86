"""Products with packed weights, at every dispatch level that this machine has: equal to the dense ones, and a row's
result depends on nothing but the row."""

import pytest
import torch

from kernels.linear.api import pack_gated_linear, pack_linear
from kernels.linear.native import LinearSequence, NativeLinear
from kernels.linear.reference import ReferenceInt8Linear, ReferenceLinear, quantize_activations, quantize_weight
from kernels.native.library import Library, built_levels, open_library, using

SHAPES = [(1, 2), (3, 1), (16, 63), (47, 64), (48, 512), (49, 513), (100, 576), (111, 1030), (576, 1536), (1000, 64)]
ROWS = [1, 2, 3, 7, 8, 9, 16, 17, 63, 97, 200]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """In float64."""
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("poisoned_empty")
def test_packed_product_equals_the_dense_one(native: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = random(*shape).to(dtype), random(shape[0], seed=2).to(dtype)
    linear, biased = pack_linear(weight), pack_linear(weight, bias)
    assert (linear.out_features, linear.in_features) == shape
    assert linear.name == f"{native.level.name}-{'f32' if dtype == torch.float32 else 'bf16'}"
    for rows in ROWS:
        x = random(rows, shape[1], seed=rows).to(dtype)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(linear(x).double(), product(weight, x), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(biased(x).double(), product(weight, x, bias), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["f32", "bf16", "bf16 times bf16"])
@pytest.mark.parametrize("shape", [(111, 63), (192, 576), (50, 1200)])
def test_a_row_has_the_same_bits_in_every_batch(native: Library, kind: str, shape: tuple[int, int]) -> None:
    """Whatever rows stand beside it, on one thread or three."""
    weight, x = random(*shape), random(700, shape[1], seed=1)
    if kind != "f32":
        weight = weight.bfloat16()
    if kind == "bf16 times bf16":
        x = x.bfloat16()
    linear = NativeLinear(native, weight, None)
    native.set_num_threads(1)
    full = linear(x)
    assert full.isfinite().all()
    native.set_num_threads(3)
    for size in (1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 33, 64, 95, 96, 97, 192, 513, 700):
        start = (size * 7) % (701 - size)
        assert torch.equal(linear(x[start : start + size]), full[start : start + size]), size


def test_a_bfloat16_weight_in_float32_is_packed_as_bfloat16_and_gives_the_same_bits(native: Library) -> None:
    weight, x = random(100, 200).bfloat16().float(), random(9, 200, seed=1)
    narrow = NativeLinear(native, weight, None)
    # the same with a row of numbers that bfloat16 does not hold
    wide = NativeLinear(native, torch.cat((weight, torch.full((1, 200), 1.001))), None)
    assert narrow.name.endswith("bf16") and wide.name.endswith("f32")
    assert torch.equal(narrow(x), wide(x)[:, :100])


def test_nan_stays_in_its_row(native: Library) -> None:
    x = random(20, 64)
    x[3, 5] = torch.nan
    out = NativeLinear(native, random(60, 64), None)(x)
    assert out[3].isnan().all()
    assert out.isnan().any(1).sum() == 1


def test_rows_may_be_views(native: Library) -> None:
    linear, wide = NativeLinear(native, random(70, 64), None), random(12, 100, seed=1)
    assert torch.equal(linear(wide[:, 10:74]), linear(wide[:, 10:74].contiguous()))
    assert torch.equal(linear(wide.T[:64].T), linear(wide[:, :64].contiguous()))


def test_no_rows_give_no_rows(native: Library) -> None:
    assert NativeLinear(native, random(70, 64), None)(random(0, 64)).shape == (0, 70)


def test_without_the_library_torch_multiplies() -> None:
    with using(None):
        linear = pack_linear(random(4, 3))
    assert isinstance(linear, ReferenceLinear)
    torch.testing.assert_close(linear(random(2, 3)).double(), product(random(4, 3), random(2, 3)))


def test_wrong_shapes_are_refused(native: Library) -> None:
    with pytest.raises(ValueError, match="pack_linear"):
        pack_linear(random(4))
    with pytest.raises(ValueError, match="pack_linear"):
        pack_linear(random(4, 3), random(3))
    linear = NativeLinear(native, random(4, 3), None)
    for wrong in (random(2, 5), random(3), random(2, 3).double()):
        with pytest.raises(ValueError, match="linear: x"):
            linear(wrong)


@pytest.mark.parametrize("shape", [(1, 64), (47, 64), (100, 63), (111, 200), (576, 1536)])
@pytest.mark.usefixtures("poisoned_empty")
def test_int8_product_is_that_of_the_codes(native: Library, shape: tuple[int, int]) -> None:
    weight, bias = random(*shape), random(shape[0], seed=2)
    linear = pack_linear(weight, bias, is_int8=True)
    assert linear.name == f"{native.level.name}-int8"
    weight_scales, weight_codes = quantize_weight(weight)
    for rows in (1, 3, 8, 9, 100):
        x = random(rows, shape[1], seed=rows)
        x[:, :64] *= 100  # a group of outliers costs the others nothing
        scales, codes = quantize_activations(x)
        seen = (scales[..., None] * codes).flatten(1)[:, : shape[1]]
        expected = product(weight_scales[:, None] * weight_codes, seen, bias)
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=1e-3)
        # and near the exact product, measured by the size of its terms: each factor has 127 steps
        terms = product(weight.square(), x.square()).sqrt()
        assert ((linear(x).double() - product(weight, x, bias)) / terms).square().mean().sqrt() < 0.02


def test_int8_has_the_same_bits_in_every_batch(native: Library) -> None:
    linear, x = NativeLinear(native, random(111, 200), is_int8=True), random(300, 200, seed=1)
    native.set_num_threads(1)
    full = linear(x)
    native.set_num_threads(3)
    for size in (1, 2, 7, 8, 9, 97, 300):
        assert torch.equal(linear(x[300 - size :]), full[300 - size :]), size


def test_int8_rounds_bfloat16_as_its_numbers_in_float32(native: Library) -> None:
    linear = NativeLinear(native, random(100, 1200), is_int8=True)
    for rows in (1, 6, 40):
        x = random(rows, 1200, seed=rows).bfloat16()
        assert torch.equal(linear(x), linear(x.float()).bfloat16()), rows


def test_int8_has_the_same_bits_at_every_level() -> None:
    """Products of codes are exact, however a CPU multiplies them."""
    results = []
    for level in built_levels():
        library = open_library(level.name)
        results.append(NativeLinear(library, random(100, 300), is_int8=True)(random(20, 300, seed=1)))
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_int8_keeps_zeros_and_shows_what_is_not_finite(native: Library) -> None:
    x = random(5, 128)
    x[1], x[2, 70], x[3, 3], x[4] = 0.0, torch.nan, torch.inf, x[4] * 1e30
    out = NativeLinear(native, random(60, 128), is_int8=True)(x)
    assert (out[1] == 0).all()
    assert out[2].isnan().all() and out[3].isnan().all()
    assert out[[0, 4]].isfinite().all()


def test_int8_takes_a_group_of_tiny_numbers_for_zeros(native: Library) -> None:
    """Their scale's inverse would overflow. What is just above the limit is rounded as ever."""
    weight, x = random(60, 128), random(4, 128)
    x[0], x[1, :64], x[2] = 1e-38, 3.6e-37, x[2] * 1e-29
    for linear in (NativeLinear(native, weight, is_int8=True), ReferenceInt8Linear(weight, None)):
        out = linear(x)
        assert out.isfinite().all() and (out[0] == 0).all()
        torch.testing.assert_close(out[1].double(), product(weight[:, 64:], x[1:2, 64:])[0], rtol=0.1, atol=0.5)
        torch.testing.assert_close(out[2] * 1e29, product(weight, x[2:3] * 1e29)[0].float(), rtol=0.1, atol=0.5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.usefixtures("poisoned_empty")
def test_a_gated_product_is_its_activation_times_the_rest(native: Library, activation: str, is_int8: bool) -> None:
    act = {"silu": torch.nn.functional.silu, "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh")}
    weight, bias = random(2 * 111, 64), random(2 * 111, seed=2)
    linear = pack_gated_linear(weight, bias, activation=activation, is_int8=is_int8)
    whole = pack_linear(weight, bias, is_int8=is_int8)
    assert linear.out_features == 111
    for rows in (1, 8, 100):
        x = random(rows, 64, seed=rows)
        gate, rest = whole(x).double().chunk(2, 1)
        torch.testing.assert_close(linear(x).double(), act[activation](gate) * rest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_int8", [False, True])
def test_without_the_library_torch_gates_and_rounds(is_int8: bool) -> None:
    weight, x = random(2 * 30, 64), random(4, 64, seed=1)
    with using(None):
        linear = pack_gated_linear(weight, activation="silu", is_int8=is_int8)
        assert linear.name == ("torch-int8" if is_int8 else "torch")
        gate, rest = product(weight, x).chunk(2, 1)
        tolerance = 0.1 if is_int8 else 1e-5
        torch.testing.assert_close(
            linear(x).double(), torch.nn.functional.silu(gate) * rest, rtol=tolerance, atol=20 * tolerance
        )


@pytest.mark.parametrize("is_int8", [False, True])
def test_largest_logit_is_that_of_the_stored_product(native: Library, is_int8: bool) -> None:
    linear = NativeLinear(native, random(1001, 64), is_int8=is_int8)
    for rows in (1, 7, 100):
        x = random(rows, 64, seed=rows)
        logits = linear(x)
        columns, values = linear.argmax(x)
        assert torch.equal(columns, logits.argmax(1))
        assert torch.equal(values, logits.amax(1))


def test_largest_logit_is_the_first_of_equal_ones_and_nan_if_one_is(native: Library) -> None:
    weight = torch.zeros(200, 64)
    weight[[17, 130, 199]] = 1.0
    linear = NativeLinear(native, weight)
    x = torch.ones(3, 64)
    x[1], x[2, 5] = -1.0, torch.nan
    columns, values = linear.argmax(x)
    assert columns[:2].tolist() == [17, 0]
    assert values[:2].tolist() == [64.0, 0.0]
    assert values[2].isnan()


@pytest.mark.parametrize("is_int8", [False, True])
def test_products_in_one_call_are_those_of_single_calls(native: Library, is_int8: bool) -> None:
    shapes = [(100, 64), (64, 100), (1000, 64)]
    linears = [NativeLinear(native, random(*shape).bfloat16(), None, is_int8=is_int8) for shape in shapes]
    inputs = [random(3, linear.in_features, seed=1) for linear in linears]
    sequence = LinearSequence(list(zip(linears, inputs, strict=True)))
    for _ in range(2):
        for found, linear, x in zip(sequence(), linears, inputs, strict=True):
            assert torch.equal(found, linear(x))
            found.fill_(float("nan"))
