"""Drawing a token from unnormalised weights by the inverse of their cumulative sum."""

import torch

_BLOCK = 128
"""Two levels: a sum per block of the vocabulary, then a cumulative sum in one block, instead of one over all of it."""


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token, in the order of ids, at which the cumulative weight exceeds `uniform * total`.

    Args:
        weights: [n, vocab_size] float32, not negative, each row with a positive sum.
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int64. A token of weight zero is never drawn. Sums are in float64, so that the order of additions, which
        differs between devices, matters only within about 1e-16 of a boundary.
    """
    rows = torch.arange(len(weights), device=weights.device)
    blocks = _in_blocks(weights)
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms * cumulative[:, -1]
    block = (cumulative <= target[:, None]).sum(-1)
    before = torch.where(block > 0, cumulative[rows, block - 1], 0.0)
    inside = blocks[rows, block]
    offset = (inside.double().cumsum(-1) <= (target - before)[:, None]).sum(-1)
    # A block's sum and the end of its cumulative sum may differ in the last bit: stay on the last token with weight.
    last = _BLOCK - 1 - (inside > 0).flip(-1).to(torch.uint8).argmax(-1)
    return block * _BLOCK + torch.minimum(offset, last)


def _in_blocks(weights: torch.Tensor) -> torch.Tensor:
    """[n, vocab_size] -> [n, blocks, _BLOCK], padded with zeros."""
    missing = -weights.shape[1] % _BLOCK
    padded = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    return padded.view(len(weights), -1, _BLOCK)
