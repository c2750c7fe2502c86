"""RMSNorm by the C++ kernel."""

import torch

from kernels.native.library import Float, Int, Library, Pointer


def rms_norm(
    library: Library, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`x / rms(x) * weight`, products in float32 and one rounding.

    Args:
        x: [num_tokens, hidden], float32 or bfloat16, contiguous.
        weight: [hidden]; read as float32.
        residual: like `x`; `x` is added to it in place and the sum is normalised.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    wide = weight.float().contiguous()
    run = library.function("pw_rms_norm", Pointer, Pointer, Pointer, Float, Int, Int, Int, Pointer)
    pointer = None if residual is None else residual.data_ptr()
    run(x.data_ptr(), pointer, wide.data_ptr(), eps, *x.shape, x.dtype == torch.bfloat16, out.data_ptr())
    return out
