"""Public entry of matrix products with a constant weight: pack once, multiply often."""

import functools
from typing import Protocol

import torch

from kernels.checks import require, same_place
from kernels.linear import mkl, onednn
from kernels.linear.reference import ReferenceLinear


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
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _mkl_usable():
        return mkl.MklLinear(weight, bias)
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and onednn.is_usable():
        return onednn.OnednnLinear(weight, bias)
    return ReferenceLinear(weight, bias)


def has_native_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16 without emulation."""
    return onednn.has_native_bfloat16()


@functools.cache
def _mkl_usable() -> bool:
    return mkl.is_usable()
