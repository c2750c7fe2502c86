"""bfloat16 on CPUs that have instructions for it: oneDNN with the weight packed once."""

import torch

_ROWS = 64
"""The batch for which oneDNN chooses the weight's layout; other sizes run on the same layout."""


class OnednnLinear:
    """`x @ weight.T + bias` with a packed bfloat16 weight; accumulates in float32."""

    name = "onednn"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def is_usable() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware and this build of torch has the packed operators."""
    return (
        has_native_bfloat16()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def has_native_bfloat16() -> bool:
    """Whether the CPU has bfloat16 products (AVX512-BF16 or AMX); emulated ones are slower than float32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
