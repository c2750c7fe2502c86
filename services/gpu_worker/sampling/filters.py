"""min_p, top_k and top_p as one cutoff per row: a token is kept if its scaled logit is at least the cutoff.

Order and meaning are those of vLLM: min_p on the whole distribution, then top_k, then top_p on what is left,
renormalised. Tokens with equal logits are kept or dropped together, so the result does not depend on how a sort breaks
ties.
"""

import torch

_CANDIDATES = 256
"""Most nuclei are smaller: the largest logits are selected, and only rows whose nucleus is larger are sorted whole."""


def cutoffs(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit that each row keeps.

    Args:
        logits: [n, vocab_size] float32, already divided by the temperature.
        top_k: [n] int64; 0 or less keeps all.
        top_p: [n] float32 in (0, 1]; 1 keeps all.
        min_p: [n] float32 in [0, 1]; 0 keeps all.

    Returns:
        [n] float32.
    """
    size = min(_CANDIDATES, logits.shape[1])
    cutoff, complete = _cutoffs_among(logits, logits.topk(size).values, top_k, top_p, min_p)
    if bool(complete.all()):
        return cutoff
    rest = ~complete
    ordered = logits[rest].sort(-1, descending=True).values
    cutoff[rest], _ = _cutoffs_among(logits[rest], ordered, top_k[rest], top_p[rest], min_p[rest])
    return cutoff


def _cutoffs_among(
    logits: torch.Tensor, ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cutoffs found in `ordered` [n, size], the largest logits in falling order, and whether those were enough."""
    size, vocab_size = ordered.shape[1], logits.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    kth = ordered.gather(1, (limit.clamp(max=size) - 1)[:, None])[:, 0]
    cutoff = torch.where(limit < vocab_size, kth, -torch.inf)
    cutoff = torch.maximum(cutoff, ordered[:, 0] + min_p.log())
    kept_total = torch.where(logits >= cutoff[:, None], logits, -torch.inf).logsumexp(-1, keepdim=True)
    probabilities = torch.where(ordered >= cutoff[:, None], (ordered - kept_total).exp(), 0.0).double()
    before = probabilities.cumsum(-1) - probabilities
    wanted = (before < top_p[:, None]).sum(-1).clamp(min=1)
    nucleus = ordered.gather(1, (wanted - 1)[:, None])[:, 0]
    cutoff = torch.maximum(cutoff, torch.where(top_p < 1, nucleus, -torch.inf))
    complete = ((limit <= size) | (limit == vocab_size)) & ((top_p >= 1) | (wanted < size))
    return cutoff, complete | (size == vocab_size)
