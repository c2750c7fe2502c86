"""Public entry of the rotary embedding."""

import torch

from kernels.checks import require, same_place
from kernels.rope import reference


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype, *, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for `rope`, once per step for all layers.

    Args:
        positions: [num_tokens] int64.
        inv_freq: [head_dim / 2] float32.
        dtype: of the result; angles are computed in float32.
        scale: factor on both tables (attention scaling of some long-context variants).

    Returns:
        cos, sin: each [num_tokens, head_dim]; `sin` is negated in its first half, so that a rotation is
        `x * cos + swap_halves(x) * sin`.
    """
    require(positions.dim() == 1 and inv_freq.dim() == 1, "rope_tables: positions and inv_freq must have one dimension")
    angles = positions.float()[:, None] * inv_freq
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate query and key heads by their positions.

    Args:
        x: [num_tokens, num_heads, head_dim], queries and keys side by side; the last dimension contiguous.
        cos, sin: from `rope_tables`, [num_tokens, head_dim], dtype and device of `x`.

    Returns:
        [num_tokens, num_heads, head_dim], new memory.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    require(x.dim() == 3 and x.shape[-1] % 2 == 0, f"rope: x {tuple(x.shape)}")
    expected = (x.shape[0], x.shape[2])
    require(cos.shape == expected and sin.shape == expected, f"rope: tables {tuple(cos.shape)}, expected {expected}")
    require(same_place(x, cos, sin), "rope: x and tables differ in dtype or device")
    return reference.rope(x, cos, sin)
