"""Rotary embedding in torch, half-split layout (Su et al. 2021, as the Llama models lay it out)."""

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs `(x[i], x[i + r/2])` of the first r dimensions, r the width of the tables.

    The sign of the first half of `sin` is already negative.
    """
    width = cos.shape[-1]
    turning = x[..., :width]
    turned = torch.addcmul(turning * cos[:, None], turning.roll(width // 2, -1), sin[:, None])
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)
