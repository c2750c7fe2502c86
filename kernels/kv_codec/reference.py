"""The codec in torch."""

import torch

LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}
"""Code that the largest number of a vector gets."""


def encode(
    kv: torch.Tensor, scale_dtype: torch.dtype, code_dtype: torch.dtype = torch.int8
) -> tuple[torch.Tensor, torch.Tensor]:
    """See api.encode. Codes are computed with the scale as it is stored, so its rounding adds no error of its own."""
    values, largest = kv.float(), LARGEST[code_dtype]
    limits = torch.finfo(scale_dtype)
    scales = (values.abs().amax(-1) / largest).clamp(max=limits.max).to(scale_dtype)
    # A vector of zeros has scale 0 and codes 0, whatever it is divided by.
    divisor = scales.float().clamp_(min=limits.smallest_normal * limits.eps)[..., None]
    codes = (values / divisor).clamp_(-largest, largest).nan_to_num_(0.0)
    return (codes.round_() if code_dtype == torch.int8 else codes).to(code_dtype), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See api.decode."""
    return codes.float().mul_(scales.float()[..., None]).to(dtype)
