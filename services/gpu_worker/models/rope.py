"""Inverse frequencies of the rotary embedding."""

import math

import torch

from services.gpu_worker.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32: the angle per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return base / rope.factor
    return _llama3(base, rope) if rope.kind == "llama3" else base


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those in between blended."""
    turns = rope.original_max_positions / (2 * math.pi / base)  # rotations over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * base / rope.factor + blend * base
    slowed = torch.where(turns < rope.low_freq_factor, base / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, base, slowed)
