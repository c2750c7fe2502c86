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
        inv_freq: [rotary_dim / 2] float32; rotary_dim is head_dim, or less if only the first dimensions rotate.
        dtype: of the result; angles are computed in float32.
        scale: factor on both tables (attention scaling of some long-context variants).

    Returns:
        cos, sin: each [num_tokens, rotary_dim]; `sin` is negated in its first half, so that a rotation is
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
        cos, sin: from `rope_tables`, [num_tokens, rotary_dim], dtype and device of `x`. Dimensions from rotary_dim on
            stay as they are.

    Returns:
        [num_tokens, num_heads, head_dim], new memory.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    require(x.dim() == 3 and x.shape[-1] % 2 == 0, f"rope: x {tuple(x.shape)}")
    fits = cos.dim() == 2 and len(cos) == len(x) and cos.shape[1] % 2 == 0 and cos.shape[1] <= x.shape[2]
    require(fits and sin.shape == cos.shape, f"rope: x {tuple(x.shape)}, tables {tuple(cos.shape)}, {tuple(sin.shape)}")
    require(same_place(x, cos, sin), "rope: x and tables differ in dtype or device")
    return reference.rope(x, cos, sin)
