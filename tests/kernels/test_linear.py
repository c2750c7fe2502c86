import pytest
import torch

from kernels.linear import mkl, onednn
from kernels.linear.api import pack_linear
from kernels.linear.reference import ReferenceLinear


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_rows", [1, 2, 63, 100, 513, 1100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_product_equals_the_dense_one(num_rows: int, has_bias: bool) -> None:
    weight, x = random(111, 63), random(num_rows, 63, seed=1)
    bias = random(111, seed=2) if has_bias else None
    linear = pack_linear(weight, bias)
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    assert (linear.out_features, linear.in_features) == (111, 63)
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not mkl.is_usable(), reason="torch without MKL")
def test_a_row_has_the_same_numbers_in_every_batch_size() -> None:
    """Bit for bit on the CPUs where it was measured; a last bit is allowed elsewhere."""
    linear, x = mkl.MklLinear(random(192, 576), None), random(700, 576, seed=1)
    full = linear(x)
    for size in (1, 2, 3, 7, 8, 33, 64, 100, 512, 513):
        torch.testing.assert_close(linear(x[:size]), full[:size], rtol=1e-6, atol=1e-5)


def test_bfloat16_packing_of_onednn_equals_the_plain_product() -> None:
    """The operators exist on every x86 build; only where the CPU computes in bfloat16 they are chosen."""
    weight, x = random(32, 48).bfloat16(), random(9, 48, seed=1).bfloat16()
    expected = ReferenceLinear(weight, None)(x).float()
    torch.testing.assert_close(onednn.OnednnLinear(weight, None)(x).float(), expected, rtol=2e-2, atol=2e-2)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="pack_linear"):
        pack_linear(random(4))
    with pytest.raises(ValueError, match="pack_linear"):
        pack_linear(random(4, 3), random(3))
