"""What the engine asks of a model, native or not."""

from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.paged_attention.api import AttentionBatch
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The flat token batch of one step, on the model's device."""

    token_ids: torch.Tensor
    """[num_tokens] int64."""
    positions: torch.Tensor
    """[num_tokens] int64."""
    slot_mapping: torch.Tensor
    """[num_tokens] int64."""
    attention: AttentionBatch
    sample_at: torch.Tensor | None
    """[num_samples] int64: the tokens whose successor is wanted; None for all of them in order."""


class Model(Protocol):
    """Weights on one device and a forward pass over a flat token batch."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the numbers that weights are rounded to: on some CPUs narrower than what they are multiplied as."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_positions(self) -> int:
        """Positions that it has tables for: the longest row."""

    @property
    def attention_s(self) -> float:
        """Seconds of the last pass that were attention. On a GPU, where calls return early: that launched it."""

    @property
    def fingerprint(self) -> str:
        """Numerics: equal fingerprints continue a request with the same tokens."""

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> torch.Tensor:
        """Run the step, write its keys and values to `cache`.

        Returns:
            Logits [num_samples, vocab_size], float32.
        """

    def forward_largest(self, inputs: ForwardInputs, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the step where only the largest logits are of interest, which then need not be stored.

        Returns:
            What `largest_of` makes of the logits.
        """


def largest_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of logits [num_samples, vocab_size]: the token of each row's largest one, and its value, NaN if one was."""
    values, tokens = logits.max(-1)
    return tokens, values
