"""Public entries of the gated activations."""

import torch

from kernels.checks import library_for, require
from kernels.gated import reference
from kernels.gated.native import Gate, gated
from kernels.launch import runs_triton


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`.

    Args:
        gate_up: [num_tokens, 2 * intermediate], the gate's half first.

    Returns:
        [num_tokens, intermediate], new memory.

    Raises:
        ValueError: the last dimension is odd.
    """
    return _gated(gate_up, Gate.SILU)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, the GELU in its tanh form (Hendrycks & Gimpel 2016), as Gemma has it; else as `silu_mul`."""
    return _gated(gate_up, Gate.GELU_TANH)


def _gated(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    require(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"gated: gate_up {tuple(gate_up.shape)}")
    if runs_triton(gate_up) and gate_up.stride(1) == 1:
        from kernels.gated import triton

        return triton.gated(gate_up, is_gelu=gate is Gate.GELU_TANH)
    library = library_for(gate_up)
    if library is not None:
        return gated(library, gate_up, gate)
    return reference.gelu_mul(gate_up) if gate is Gate.GELU_TANH else reference.silu_mul(gate_up)
