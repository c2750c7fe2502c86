"""Gated activations in torch, of rows `[gate | up]`."""

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, tanh form."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh").mul_(up)
