"""Inverse frequencies of the rotary embedding."""

import math

import torch

from services.gpu_worker.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """[rotary_dim / 2] float32: the angle per position of each pair of dimensions."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    base = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "linear":
            return base / rope.factor
        case "llama3":
            return _llama3(base, rope)
        case "yarn":
            return _yarn(base, rope)
        case "longrope":
            return base / torch.tensor(rope.divisors)
        case _:
            return base


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those in between blended."""
    turns = rope.original_max_positions / (2 * math.pi / base)  # rotations over the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * base / rope.factor + blend * base
    slowed = torch.where(turns < rope.low_freq_factor, base / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, base, slowed)


def _yarn(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Peng et al. 2023: as `_llama3`, but blended linearly in the dimension instead of in the number of rotations."""
    first, last = (_pair_that_turns(turns, rope) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    span = last - first or 0.001  # no division by zero
    slowed = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - first) / span).clamp(0, 1)
    return base / rope.factor * slowed + base * (1 - slowed)


def _pair_that_turns(turns: float, rope: RopeConfig) -> float:
    """Which pair of dimensions makes `turns` rotations over the original context; a fraction in general."""
    wave = rope.original_max_positions / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))
