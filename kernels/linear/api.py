"""Public entry of matrix products with a constant weight: pack once, multiply often.

On a CPU the result of a row does not depend on the rows beside it, nor on their number or on the number of threads, bit
for bit: every output is one sum over k, ascending, in float32.
"""

from typing import Protocol

import torch

from kernels.checks import require, same_place
from kernels.linear.native import NativeLinear
from kernels.linear.reference import ReferenceLinear
from kernels.native.library import current

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)


class Linear(Protocol):
    """A packed weight. `linear(x)`: [num_tokens, in_features] -> [num_tokens, out_features]."""

    name: str
    """Of the implementation, for the numerics fingerprint."""
    out_features: int
    in_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Choose an implementation for the weight's dtype and device, and pack the weight for it.

    Args:
        weight: [out_features, in_features]. The caller may free it afterwards.
        bias: [out_features] or None.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    require(weight.dim() == 2, f"pack_linear: weight {tuple(weight.shape)}")
    if bias is not None:
        require(bias.shape == weight.shape[:1], f"pack_linear: bias {tuple(bias.shape)}, weight {tuple(weight.shape)}")
        require(same_place(weight, bias), "pack_linear: weight and bias differ in dtype or device")
    library = current() if weight.device.type == "cpu" and weight.dtype in _NATIVE_DTYPES else None
    return ReferenceLinear(weight, bias) if library is None else NativeLinear(library, weight, bias)


def has_native_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16 without emulation: AVX512-BF16, or AMX for torch alone."""
    library = current()
    if library is not None:
        return library.takes_bfloat16
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
