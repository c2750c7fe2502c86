"""Sampling in torch: the filters as one cutoff per row (filters.py), then the races (race.py)."""

import torch

from kernels.sampling.filters import cutoffs
from kernels.sampling.race import race


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    times: torch.Tensor,
) -> torch.Tensor:
    """See api.sample."""
    # The largest logit becomes 0 before the division: a small temperature cannot overflow it.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    rows = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero()[:, 0]
    if len(rows):
        subset = scaled[rows]
        lowest = cutoffs(subset, top_k[rows], top_p[rows], min_p[rows])
        scaled[rows] = subset.masked_fill_(subset < lowest[:, None], -torch.inf)
    return race(scaled.exp_(), times)
