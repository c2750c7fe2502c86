"""Products with packed weights, at every dispatch level that this machine has: equal to the dense ones, and a row's
result depends on nothing but the row."""

import pytest
import torch

from kernels.linear.api import pack_linear
from kernels.linear.native import NativeLinear
from kernels.linear.reference import ReferenceLinear
from kernels.native.library import Library, using

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
