"""Public entry of RMSNorm."""

import torch

from kernels.checks import library_for, require
from kernels.launch import runs_triton
from kernels.rms_norm import native, reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row.

    Args:
        x: [num_tokens, hidden].
        weight: [hidden] on the device of `x`. In the dtype of `x`, torch rounds the quotient to it before the product
            (Llama); in float32, and always by the C++ kernel, the product is taken in float32 and rounded once (Gemma).
        eps: added to the mean square.

    Returns:
        [num_tokens, hidden], new memory.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    require(x.dim() == 2 and weight.shape == x.shape[1:], f"rms_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    sound = weight.dtype in (x.dtype, torch.float32) and weight.device == x.device
    require(sound, "rms_norm: x and weight differ in dtype or device")
    if runs_triton(x) and x.stride(1) == 1:
        from kernels.rms_norm import triton

        return triton.rms_norm(x, weight, eps)
    library = library_for(x)
    if library is not None:
        return native.rms_norm(library, x, weight, eps)
    return reference.rms_norm(x, weight, eps)
