"""Sampling parameters as their definitions say, one row at a time over a whole sorted vocabulary, in float64."""

import numpy as np

from shared.sampling import SamplingParams


def processed_logits(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], eos: tuple[int, ...] = ()
) -> np.ndarray:
    """Logits after masks, bias and penalties."""
    z = logits.astype(np.float64).copy()
    if len(output) < params.min_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            z[token] = -np.inf
    for token, bias in params.logit_bias:
        z[token] += bias
    for token in sorted(set(prompt) | set(output)):
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in output:
        z[token] -= params.frequency_penalty
    for token in sorted(set(output)):
        z[token] -= params.presence_penalty
    return z


def distribution(z: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, min_p, top_k and top_p."""
    z = z / params.temperature
    p = _softmax(z)
    z = np.where(p >= params.min_p * p.max(), z, -np.inf)
    if 0 < params.top_k < len(z):
        z = np.where(z >= np.sort(z)[-params.top_k], z, -np.inf)
    if params.top_p < 1:
        p = _softmax(z)
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        z = np.where(p >= p[order][before < params.top_p][-1], z, -np.inf)
    return _softmax(z)


def _softmax(z: np.ndarray) -> np.ndarray:
    weights = np.exp(z - z.max())
    return weights / weights.sum()
