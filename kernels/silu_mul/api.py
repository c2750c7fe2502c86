"""Public entry of the gated activation."""

import torch

from kernels.checks import library_for, require
from kernels.gated.native import Gate, gated
from kernels.launch import runs_triton
from kernels.silu_mul import reference


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`.

    Args:
        gate_up: [num_tokens, 2 * intermediate], the gate's half first.

    Returns:
        [num_tokens, intermediate], new memory.

    Raises:
        ValueError: the last dimension is odd.
    """
    require(gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"silu_mul: gate_up {tuple(gate_up.shape)}")
    if runs_triton(gate_up) and gate_up.stride(1) == 1:
        from kernels.gated import triton

        return triton.gated(gate_up, is_gelu=False)
    library = library_for(gate_up)
    if library is not None:
        return gated(library, gate_up, Gate.SILU)
    return reference.silu_mul(gate_up)
