"""Two models over one text: how unlikely it is to each, and how far apart their predictions are."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kv_cache.engine_kv import Bench


@dataclass(slots=True)
class Sums:
    """Over all predicted tokens."""

    num_predicted: int = 0
    reference_nll: float = 0.0
    candidate_nll: float = 0.0
    kl: float = 0.0
    num_agreed: int = 0
    """Predictions whose likeliest token is the same."""

    def add(self, reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> None:
        """Logits [n, vocab_size] of both, and the n tokens that follow."""
        expected, found = reference.log_softmax(-1), candidate.log_softmax(-1)
        self.num_predicted += len(targets)
        self.reference_nll -= float(expected.gather(1, targets[:, None]).sum())
        self.candidate_nll -= float(found.gather(1, targets[:, None]).sum())
        self.kl += float((expected.exp() * (expected - found)).sum())
        self.num_agreed += int((expected.argmax(-1) == found.argmax(-1)).sum())

    @property
    def perplexities(self) -> tuple[float, float]:
        """Of the reference and of the candidate."""
        return math.exp(self.reference_nll / self.num_predicted), math.exp(self.candidate_nll / self.num_predicted)

    @property
    def change(self) -> float:
        """Of the perplexity, as a share."""
        return math.exp((self.candidate_nll - self.reference_nll) / self.num_predicted) - 1

    @property
    def mean_kl(self) -> float:
        """Of the candidate's predictions from the reference's, in nats."""
        return self.kl / self.num_predicted


@torch.inference_mode()
def compare(
    reference: Any, candidate: Any, tokens: list[int], segment: int, *, kv_dtype: torch.dtype | None = None
) -> Sums:
    """Read the text in segments of `segment` tokens, each from its beginning; what is left over is a shorter one.

    Args:
        kv_dtype: of the candidate's KV cache; its own if absent.
    """
    sums = Sums()
    pairs = ((reference, None), (candidate, kv_dtype))
    first, second = (Bench(model, num_requests=1, max_tokens=segment, kv_dtype=kv) for model, kv in pairs)
    for start in range(0, len(tokens), segment):
        part = tokens[start : start + segment]
        if len(part) > 1:
            expected, found = (bench.forward(0, part, 0, all_logits=True)[:-1] for bench in (first, second))
            sums.add(expected, found, torch.tensor(part[1:]))
    return sums
