"""Public entry of the int8 codec for keys and values that wait in the host pool.

Symmetric, one scale per vector: `code = round(x / scale)`, `scale = largest |x| / 127`. A vector is one token of one
head (of K or V, of one layer), the finest grouping that costs one number per `head_dim`: outliers of a channel or of a
token, which keys of Llama models have, spoil no other token's precision.

    |x - decode(encode(x))|  <=  scale / 2 + 4e-6     (4e-6: scales below 6e-5 are rounded more coarsely)

Measured over the KV of 4,096 tokens of prose in the default model (SmolLM2-135M, head_dim 64, computed in float32):
relative error (root mean square) 1.026 % of K and 0.671 % of V, whether scales are float16 or float32. So they are
float16, for a ratio of 3.88 instead of 3.76 against float32 and 1.94 instead of 1.88 against bfloat16. A general
compressor on top does not pay (infra/adr/0006).
"""

import torch

from kernels.checks import require
from kernels.kv_codec import reference

SCALE_DTYPE = torch.float16


def encode(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize.

    Args:
        kv: [..., head_dim], float32, bfloat16 or float16. A NaN makes its own vector NaN and touches no other.

    Returns:
        codes: [..., head_dim] int8.
        scales: [...] float16.

    Raises:
        ValueError: not a floating-point tensor, or an empty head.
    """
    require(kv.is_floating_point() and kv.dim() > 1 and kv.shape[-1] > 0, f"encode: {tuple(kv.shape)} {kv.dtype}")
    return reference.encode(kv, SCALE_DTYPE)


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `encode`, up to the error stated above and the rounding to `dtype`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    fits = codes.dtype == torch.int8 and scales.dtype == SCALE_DTYPE and codes.shape[:-1] == scales.shape
    require(fits, f"decode: codes {tuple(codes.shape)} {codes.dtype}, scales {tuple(scales.shape)} {scales.dtype}")
    return reference.decode(codes, scales, dtype)


def bytes_per_vector(head_dim: int) -> int:
    """Bytes of the encoded form of `head_dim` numbers."""
    return head_dim + SCALE_DTYPE.itemsize
