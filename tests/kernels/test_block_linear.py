"""Products with weights in GGUF's blocks, at every dispatch level that this machine has: the same numbers that the
library of the format reads, times activations rounded per block; and a row's result depends on nothing but the row."""

import gguf
import numpy as np
import pytest
import torch

from kernels.linear.api import pack_gated_linear, pack_linear
from kernels.linear.blocks import BLOCK, BlockForm, BlockWeight, parse_blocks, round_to_q8_0, stack
from kernels.linear.native import LinearSequence, NativeLinear
from kernels.linear.reference import ReferenceBlockLinear, quantize_activations
from kernels.native.library import Library, built_levels, open_library, using

FORMS = list(BlockForm)
SHAPES = [(1, 32), (3, 64), (47, 96), (48, 512), (49, 544), (111, 1056), (576, 1536), (1000, 64)]
ROWS = [1, 2, 3, 7, 8, 9, 16, 17, 63, 97, 200]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def raw_blocks(form: BlockForm, shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Bytes of a weight in a file, with every code, and scales and minima of both signs."""
    draw = np.random.default_rng(seed)
    raw = draw.integers(0, 256, (shape[0], shape[1] // BLOCK, form.bytes_per_block), np.uint8)
    factors = draw.normal(0, 0.02, (*raw.shape[:2], form.num_factors)).astype(np.float16)
    raw[..., : 2 * form.num_factors] = factors.view(np.uint8)
    return raw.reshape(shape[0], -1)


def weight_of(form: BlockForm, shape: tuple[int, int], seed: int = 0) -> BlockWeight:
    return parse_blocks(form, torch.from_numpy(raw_blocks(form, shape, seed)))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the kernels make of activations, in float64."""
    scales, codes = quantize_activations(x, BLOCK)
    return (scales[..., None] * codes).flatten(1).double()


@pytest.mark.parametrize("form", FORMS)
def test_blocks_hold_what_the_library_of_the_format_reads(form: BlockForm) -> None:
    raw = raw_blocks(form, (37, 96))
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[form])
    weight = parse_blocks(form, torch.from_numpy(raw))
    assert weight.shape == (37, 96)
    assert torch.equal(weight.dequantized(), torch.from_numpy(expected))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("poisoned_empty")
def test_product_is_that_of_the_codes(native: Library, form: BlockForm, shape: tuple[int, int]) -> None:
    weight, bias = weight_of(form, shape), random(shape[0], seed=2)
    exact = weight.dequantized().double()
    linear, biased = pack_linear(weight), pack_linear(weight, bias)
    assert (linear.out_features, linear.in_features) == shape
    assert linear.name == f"{native.level.name}-{form.lower()}"
    for rows in ROWS:
        x = random(rows, shape[1], seed=rows)
        x[:, :BLOCK] *= 100  # a block of outliers costs the others nothing
        expected = rounded(x) @ exact.T
        size = float((rounded(x).abs() @ exact.abs().T).max())
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-6 * size)
        torch.testing.assert_close(biased(x).double(), expected + bias, rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_every_batch(native: Library, form: BlockForm) -> None:
    """Whatever rows stand beside it, on one thread or three."""
    linear, x = NativeLinear(native, weight_of(form, (111, 1440))), random(300, 1440, seed=1)
    native.set_num_threads(1)
    full = linear(x)
    assert full.isfinite().all()
    native.set_num_threads(3)
    for size in (1, 2, 3, 5, 7, 8, 9, 17, 95, 97, 300):
        assert torch.equal(linear(x[300 - size :]), full[300 - size :]), size


@pytest.mark.parametrize("form", FORMS)
def test_products_have_the_same_bits_at_every_level(form: BlockForm) -> None:
    weight, x = weight_of(form, (100, 320)), random(20, 320, seed=1)
    results = [NativeLinear(open_library(level.name), weight)(x) for level in built_levels()]
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("poisoned_empty")
def test_a_gated_product_is_its_activation_times_the_rest(native: Library, form: BlockForm) -> None:
    weight, bias = weight_of(form, (2 * 111, 64)), random(2 * 111, seed=2)
    gated, whole = pack_gated_linear(weight, bias, activation="silu"), pack_linear(weight, bias)
    assert gated.out_features == 111
    for rows in (1, 8, 100):
        x = random(rows, 64, seed=rows)
        gate, rest = whole(x).double().chunk(2, 1)
        torch.testing.assert_close(gated(x).double(), torch.nn.functional.silu(gate) * rest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_largest_product_is_that_of_the_stored_ones(native: Library, form: BlockForm) -> None:
    linear = NativeLinear(native, weight_of(form, (1001, 64)))
    for rows in (1, 7, 100):
        x = random(rows, 64, seed=rows)
        columns, values = linear.argmax(x)
        assert torch.equal(columns, linear(x).argmax(1))
        assert torch.equal(values, linear(x).amax(1))


@pytest.mark.parametrize("form", FORMS)
def test_products_in_one_call_are_those_of_single_calls(native: Library, form: BlockForm) -> None:
    linears = [NativeLinear(native, weight_of(form, shape)) for shape in ((100, 64), (64, 96), (1000, 64))]
    inputs = [random(3, linear.in_features, seed=1).bfloat16() for linear in linears]
    for found, linear, x in zip(
        LinearSequence(list(zip(linears, inputs, strict=True)))(), linears, inputs, strict=True
    ):
        assert torch.equal(found, linear(x))


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros_and_what_is_not_finite_shows(native: Library, form: BlockForm) -> None:
    x = random(5, 128)
    x[0], x[1], x[2, 70], x[3, 3], x[4] = 1e-38, 0.0, torch.nan, torch.inf, x[4] * 1e30
    for linear in (
        NativeLinear(native, weight_of(form, (60, 128))),
        ReferenceBlockLinear(weight_of(form, (60, 128)), None),
    ):
        out = linear(x)
        assert (out[:2] == 0).all()
        assert out[2:4].isnan().all()
        assert out[4].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_without_the_library_torch_rounds_alike(native: Library, form: BlockForm) -> None:
    weight, x = weight_of(form, (2 * 30, 64)), random(4, 64, seed=1)
    with using(None):
        linear, gated = pack_linear(weight), pack_gated_linear(weight, activation="silu")
    assert linear.name == gated.name == f"torch-{form.lower()}"
    torch.testing.assert_close(linear(x), NativeLinear(native, weight)(x), rtol=1e-5, atol=1e-5)
    assert linear(x.bfloat16()).dtype == torch.bfloat16


def test_rounding_to_q8_0_is_exact_where_it_can_be_and_near_elsewhere() -> None:
    for form in (BlockForm.Q8_0, BlockForm.Q4_0):
        weight = weight_of(form, (20, 64))
        assert torch.equal(round_to_q8_0(weight).dequantized(), weight.dequantized())
    for numbers in (weight_of(BlockForm.Q4_1, (20, 64)).dequantized(), torch.zeros(3, 32), random(5, 96)):
        found = round_to_q8_0(numbers)
        assert found.form is BlockForm.Q8_0
        steps = numbers.unflatten(1, (-1, BLOCK)).abs().amax(-1, keepdim=True) / 127
        assert ((found.dequantized() - numbers).unflatten(1, (-1, BLOCK)).abs() <= 0.6 * steps).all()


def test_rows_and_stacks_move_whole_output_features() -> None:
    weight = weight_of(BlockForm.Q4_1, (6, 64))
    order = torch.tensor([4, 1, 5])
    assert torch.equal(weight.rows(order).dequantized(), weight.dequantized()[order])
    assert torch.equal(stack([weight, weight.rows(order)]).dequantized()[6:], weight.dequantized()[order])
    with pytest.raises(ValueError, match="forms"):
        stack([weight, weight_of(BlockForm.Q8_0, (6, 64))])


def test_bytes_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="parse_blocks"):
        parse_blocks(BlockForm.Q4_0, torch.zeros(3, 19, dtype=torch.uint8))
