"""Rotary embedding in torch, half-split layout (Su et al. 2021, as the Llama models lay it out)."""

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs `(x[i], x[i + d/2])`; the sign of the first half of `sin` is already negative."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos[:, None], x.roll(half, -1), sin[:, None])
