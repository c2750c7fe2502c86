"""Gated activations on a GPU."""

import torch
import triton
import triton.language as tl

from kernels.launch import Launch

_BLOCK = 1024


@triton.jit
def _sigmoid(x):
    """Without an exponential that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def gated_kernel(
    out,  # [num_tokens, width]
    gate_up,  # [num_tokens, 2 * width], rows stride apart
    width,
    stride,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    if IS_GELU:
        # (1 + tanh(u)) / 2 = sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x ** 3)
        opened = _sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    else:
        opened = _sigmoid(wide)
    activated = (wide * opened).to(gate.dtype).to(tl.float32)  # rounded where the reference rounds
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    """See `api.py`."""
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    launch(out, gate_up, is_gelu=is_gelu).run()
    return out


def launch(out: torch.Tensor, gate_up: torch.Tensor, *, is_gelu: bool = False) -> Launch:
    """The kernel that fills `out` [num_tokens, intermediate]; the last dimension of `gate_up` is contiguous."""
    width = out.shape[1]
    arguments = {"out": out, "gate_up": gate_up, "width": width, "stride": gate_up.stride(0)}
    constants = {"IS_GELU": is_gelu, "BLOCK": _BLOCK}
    return Launch(gated_kernel, (len(out), triton.cdiv(width, _BLOCK)), arguments, constants)
