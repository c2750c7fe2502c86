"""Runs of an int8 cache: the codes of all tokens, then a scale per token, in bfloat16.

    K  [head_dim][block_size] codes, [block_size] scales
    V  [block_size][head_dim] codes, [block_size] scales

As kernels/kv_codec: `code = round(x / scale)`, `scale = largest |x| / 127`, one vector a token of one head. The C++
cache write (kernels/cache_write/codes.h) stores the same bits.
"""

import torch

from kernels.kv_codec import reference

SCALE_DTYPE = torch.bfloat16


def width(head_dim: int) -> int:
    """Bytes of a token in a run, its share of the scales included."""
    return head_dim + SCALE_DTYPE.itemsize


def split(run: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a run [..., block_size, width]: codes [..., block_size * head_dim] and scales [..., block_size]."""
    block_size, num_codes = run.shape[-2], run.shape[-2] * (run.shape[-1] - SCALE_DTYPE.itemsize)
    flat = run.flatten(-2)
    scales = flat[..., num_codes:].view(SCALE_DTYPE)
    assert scales.shape[-1] == block_size
    return flat[..., :num_codes], scales


def decode(run: torch.Tensor, *, is_keys: bool) -> torch.Tensor:
    """[..., block_size, width] int8 -> [..., block_size, head_dim] float32, new memory."""
    codes, scales = split(run)
    block_size = scales.shape[-1]
    lines = codes.unflatten(-1, (-1, block_size) if is_keys else (block_size, -1))
    return reference.decode(lines.transpose(-2, -1) if is_keys else lines, scales, torch.float32)


def encode(plain: torch.Tensor, run: torch.Tensor, *, is_keys: bool) -> None:
    """Store [..., block_size, head_dim] in `run` [..., block_size, width] int8."""
    codes, scales = reference.encode(plain, SCALE_DTYPE)
    to_codes, to_scales = split(run)
    to_codes.copy_((codes.transpose(-2, -1) if is_keys else codes).flatten(-2))
    to_scales.copy_(scales)
