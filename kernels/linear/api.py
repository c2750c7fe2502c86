"""Public entry of matrix products with a constant weight: pack once, multiply often.

On a CPU the result of a row does not depend on the rows beside it, nor on their number or on the number of threads, bit
for bit: every output is one sum over k, ascending, in float32.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from kernels.checks import require, same_place
from kernels.gated.api import gelu_mul, silu_mul
from kernels.gated.native import Gate
from kernels.linear.blocks import BlockWeight
from kernels.linear.native import NativeLinear
from kernels.linear.reference import ReferenceBlockLinear, ReferenceInt8Linear, ReferenceLinear
from kernels.native.library import Library, current

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_GATES = {"silu": (Gate.SILU, silu_mul), "gelu_tanh": (Gate.GELU_TANH, gelu_mul)}


class Linear(Protocol):
    """A packed weight. `linear(x)`: [num_tokens, in_features] -> [num_tokens, out_features]."""

    name: str
    """Of the implementation, for the numerics fingerprint."""
    out_features: int
    in_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


Weight = torch.Tensor | BlockWeight
"""[out_features, in_features]; in blocks it stays as it is, whatever computes."""


def pack_linear(weight: Weight, bias: torch.Tensor | None = None, *, is_int8: bool = False) -> Linear:
    """Choose an implementation for the weight's dtype and device, and pack the weight for it.

    Args:
        weight: [out_features, in_features]. The caller may free it afterwards. With one in blocks, activations are
            rounded to int8 with one scale per row and block.
        bias: [out_features] or None.
        is_int8: round a tensor to int8 with one scale per output feature, and activations with one scale per row and
            64 of their numbers.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    _check(weight, bias)
    library = _library(weight)
    if library is not None:
        return NativeLinear(library, weight, bias, is_int8=is_int8)
    if isinstance(weight, BlockWeight):
        return ReferenceBlockLinear(weight, bias)
    return ReferenceInt8Linear(weight, bias) if is_int8 else ReferenceLinear(weight, bias)


def pack_gated_linear(
    weight: Weight, bias: torch.Tensor | None = None, *, activation: str, is_int8: bool = False
) -> Linear:
    """As `pack_linear`, for a product whose first half gates the second: `activation(gate) * rest`.

    Args:
        weight: [2 * out_features, in_features], the gate's half first.
        activation: `silu` or `gelu_tanh`.
    """
    _check(weight, bias)
    outputs = weight.shape[0]
    require(outputs % 2 == 0 and activation in _GATES, f"pack_linear: {outputs} rows gated by {activation!r}")
    library = _library(weight)
    if library is not None:
        return NativeLinear(library, weight, bias, activation=_GATES[activation][0], is_int8=is_int8)
    return _Gated(pack_linear(weight, bias, is_int8=is_int8), _GATES[activation][1])


class _Gated:
    """A product, then the activation."""

    def __init__(self, linear: Linear, activate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.name, self.in_features, self.out_features = linear.name, linear.in_features, linear.out_features // 2
        self._linear = linear
        self._activate = activate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._activate(self._linear(x))


def _check(weight: Weight, bias: torch.Tensor | None) -> None:
    shape = tuple(weight.shape)
    require(len(shape) == 2, f"pack_linear: weight {shape}")
    if bias is not None:
        require(tuple(bias.shape) == shape[:1], f"pack_linear: bias {tuple(bias.shape)}, weight {shape}")
        fits = isinstance(weight, BlockWeight) or same_place(weight, bias)
        require(fits, "pack_linear: weight and bias differ in dtype or device")


def _library(weight: Weight) -> Library | None:
    if isinstance(weight, BlockWeight):
        return current()
    return current() if weight.device.type == "cpu" and weight.dtype in _NATIVE_DTYPES else None


def has_native_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16 without emulation: AVX512-BF16, or AMX for torch alone."""
    library = current()
    if library is not None:
        return library.takes_bfloat16
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
