"""Matrix product with a weight, in torch."""

import torch

from kernels.linear.blocks import BLOCK, BlockWeight

CODE_GROUP = 64
"""Numbers of int8 activations that share a scale."""
_LARGEST_CODE = 127
_SMALLEST = 1e-30
"""127 divided by a smaller number may overflow: a group of such numbers is rounded to 0."""


class ReferenceLinear:
    """`x @ weight.T + bias` by `torch.nn.functional.linear`."""

    name = "torch"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight, self._bias)


class ReferenceInt8Linear(ReferenceLinear):
    """The same with weight and activations rounded to int8 codes and back: what int8 kernels compute, not how fast."""

    name = "torch-int8"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        scales, codes = quantize_weight(weight)
        super().__init__((scales[:, None] * codes).to(weight.dtype), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scales, codes = quantize_activations(x)
        return super().__call__((scales[..., None] * codes).flatten(1)[:, : self.in_features].to(x.dtype))


class ReferenceBlockLinear(ReferenceLinear):
    """The same for a weight in blocks, with activations rounded in groups of BLOCK."""

    def __init__(self, weight: BlockWeight, bias: torch.Tensor | None) -> None:
        super().__init__(weight.dequantized(), None if bias is None else bias.float())
        self.name = f"torch-{weight.form.lower()}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scales, codes = quantize_activations(x, BLOCK)
        return super().__call__((scales[..., None] * codes).flatten(1)).to(x.dtype)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [out_features] float32 and codes [out_features, in_features] int8: `weight` is about scale * code."""
    wide = weight.float()
    scales = wide.abs().amax(1) / _LARGEST_CODE
    codes = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return scales, codes.clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8)


def quantize_activations(x: torch.Tensor, size: int = CODE_GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [rows, groups] and codes [rows, groups, size] float32, zeros behind the last number."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    largest = groups.abs().amax(2)
    codes = (groups * torch.where(largest < _SMALLEST, 0.0, _LARGEST_CODE / largest)[..., None]).round()
    return largest / _LARGEST_CODE, codes
