"""Runs of a cache of codes: the codes of all tokens, then a scale per token.

    plain       K and V  [block_size][head_dim] codes of int8 or fp8, [block_size] scales in float16
    packed      K        [head_dim][block_size] codes of int8, [block_size] scales in bfloat16
                V        [block_size][head_dim] codes of int8, [block_size] scales in bfloat16

As kernels/kv_codec: `code = round(x / scale)`, `scale = largest |x| / largest code`, one vector a token of one head.
The cache writes of Triton and C++ (kernels/cache_write: triton.py, codes.h) store the same bits. A scale takes two
bytes in either, so a run has the same size.
"""

import torch

from kernels.kv_codec import reference

DTYPES = tuple(reference.LARGEST)
"""Of codes: int8 and float8_e4m3fn."""
PACKED_SCALE_DTYPE = torch.bfloat16
"""Which becomes float32 by a shift."""
PLAIN_SCALE_DTYPE = torch.float16


def width(head_dim: int) -> int:
    """Bytes of a token in a run, its share of the scales included."""
    return head_dim + PACKED_SCALE_DTYPE.itemsize


def split(run: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a packed run [..., block_size, width]: codes [..., block_size * head_dim], scales [..., block_size]."""
    return _split(run, PACKED_SCALE_DTYPE)


def split_plain(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of plain runs [..., block_size, width]: codes [..., block_size, head_dim], scales [..., block_size]."""
    codes, scales = _split(cache, PLAIN_SCALE_DTYPE)
    return codes.unflatten(-1, (cache.shape[-2], -1)), scales


def _split(run: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    block_size, num_codes = run.shape[-2], run.shape[-2] * (run.shape[-1] - scale_dtype.itemsize)
    flat = run.flatten(-2)
    scales = flat[..., num_codes:].view(scale_dtype)
    assert scales.shape[-1] == block_size
    return flat[..., :num_codes], scales


def decode(run: torch.Tensor, *, is_keys: bool) -> torch.Tensor:
    """Packed [..., block_size, width] int8 -> [..., block_size, head_dim] float32, new memory."""
    codes, scales = split(run)
    block_size = scales.shape[-1]
    lines = codes.unflatten(-1, (-1, block_size) if is_keys else (block_size, -1))
    return reference.decode(lines.transpose(-2, -1) if is_keys else lines, scales, torch.float32)


def encode(plain: torch.Tensor, run: torch.Tensor, *, is_keys: bool) -> None:
    """Store [..., block_size, head_dim] in the packed `run` [..., block_size, width] int8."""
    codes, scales = reference.encode(plain, PACKED_SCALE_DTYPE)
    to_codes, to_scales = split(run)
    to_codes.copy_((codes.transpose(-2, -1) if is_keys else codes).flatten(-2))
    to_scales.copy_(scales)
