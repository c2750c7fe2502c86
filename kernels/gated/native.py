"""Gated activations by the C++ kernel."""

from enum import IntEnum

import torch

from kernels.native.library import Int, Library, Pointer


class Gate(IntEnum):
    """As in gated.h."""

    SILU = 0
    GELU_TANH = 1


def gated(library: Library, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """`act(gate) * up` of contiguous rows `[gate | up]`, [num_tokens, 2 * n] -> [num_tokens, n]; one rounding."""
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2, dtype=gate_up.dtype)
    run = library.function("pw_gated", Pointer, Int, Int, Int, Int, Pointer)
    run(gate_up.data_ptr(), num_tokens, width // 2, gate_up.dtype == torch.bfloat16, gate, out.data_ptr())
    return out
