"""The int8 codec in torch."""

import torch

_LARGEST = 127


def encode(kv: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See api.encode. Codes are computed with the scale as it is stored, so its rounding adds no error of its own."""
    values = kv.float()
    limits = torch.finfo(scale_dtype)
    scales = (values.abs().amax(-1) / _LARGEST).clamp(max=limits.max).to(scale_dtype)
    # A vector of zeros has scale 0 and codes 0, whatever it is divided by.
    divisor = scales.float().clamp_(min=limits.smallest_normal * limits.eps)[..., None]
    codes = (values / divisor).round_().clamp_(-_LARGEST, _LARGEST)
    return codes.nan_to_num_(0.0).to(torch.int8), scales


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See api.decode."""
    return (codes * scales.float()[..., None]).to(dtype)
