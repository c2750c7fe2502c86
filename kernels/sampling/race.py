"""Drawing a token from unnormalised weights by races, which an error in the last bits of the logits hardly ever turns.

If every token waits for a time drawn from an exponential distribution with its weight as the rate, the first to arrive
is a draw from the weights (the "Gumbel-max trick", said without logarithms). One race over the vocabulary would need a
random number per token; so the vocabulary is a tree with `FAN_OUT` children per node, and each level is a race among
the sums of one node's children.

Logits differ in their last bits between batch shapes and kernels. A race changes its winner only if the first two
arrive that close to each other. Inverting the cumulative sum, the obvious way, goes wrong far more often: an error in
one weight moves every boundary after it, and there are as many boundaries as tokens. Measured on 20,480 draws at
temperature 1 of a 135M model in float32, decoded in a batch and prefilled: 55 changed that way, none this way.
"""

import torch

FAN_OUT = 64
"""Two or three levels for any vocabulary up to 262,144: at most 192 random numbers per draw."""


def num_levels(vocab_size: int) -> int:
    """Races that decide on one of `vocab_size` tokens."""
    levels = 1
    while FAN_OUT**levels < vocab_size:
        levels += 1
    return levels


def race(weights: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The winner of each row, drawn with a probability proportional to its weight.

    Args:
        weights: [n, vocab_size] float32, not negative, each row with a positive sum.
        times: [n, num_levels(vocab_size), FAN_OUT] float64, positive: independent exponential variables of rate 1, the
            root's level first.

    Returns:
        [n] int64. A token of weight zero is never drawn.
    """
    levels = [_families(weights)]
    while levels[-1].shape[1] > 1:
        levels.append(_families(levels[-1].sum(-1)))
    rows = torch.arange(len(weights), device=weights.device)
    node = torch.zeros_like(rows)
    for level, families in enumerate(reversed(levels)):
        node = node * FAN_OUT + (families[rows, node] / times[:, level]).argmax(-1)
    return node


def _families(values: torch.Tensor) -> torch.Tensor:
    """[n, size] -> [n, parents, FAN_OUT], padded with zeros."""
    missing = -values.shape[1] % FAN_OUT
    padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return padded.view(len(values), -1, FAN_OUT)
