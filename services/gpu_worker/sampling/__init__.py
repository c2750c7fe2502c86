"""Sampling: from logits to one token per row."""

from services.gpu_worker.sampling.sampler import Sampled, Sampler

__all__ = ["Sampled", "Sampler"]
