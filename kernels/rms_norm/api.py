"""Public entry of RMSNorm."""

import torch

from kernels.checks import require
from kernels.rms_norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row.

    Args:
        x: [num_tokens, hidden].
        weight: [hidden] on the device of `x`. In the dtype of `x`, the quotient is rounded to it before the product
            (Llama); in float32, the product is taken in float32 and rounded once (Gemma).
        eps: added to the mean square.

    Returns:
        [num_tokens, hidden], new memory.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    require(x.dim() == 2 and weight.shape == x.shape[1:], f"rms_norm: x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    sound = weight.dtype in (x.dtype, torch.float32) and weight.device == x.device
    require(sound, "rms_norm: x and weight differ in dtype or device")
    return reference.rms_norm(x, weight, eps)
