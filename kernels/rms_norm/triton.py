"""RMSNorm on a GPU: one program per row, which is read once."""

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, next_power_of_2


@triton.jit
def rms_norm_kernel(
    out,  # [num_tokens, hidden]
    x,  # [num_tokens, hidden], rows stride apart
    weight,  # [hidden]
    hidden,
    stride,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    # Rounded where the reference rounds: to the weight's dtype before the product.
    rounded = normed.to(weight.dtype.element_ty).to(tl.float32)
    scaled = rounded * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + columns, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See api.rms_norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(out, x, weight, eps).run()
    return out


def launch(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Launch:
    """The kernel that fills `out` [num_tokens, hidden]; the last dimension of `x` is contiguous."""
    hidden = x.shape[1]
    block = next_power_of_2(hidden)
    arguments = {"out": out, "x": x, "weight": weight, "hidden": hidden, "stride": x.stride(0), "eps": eps}
    return Launch(rms_norm_kernel, (len(x),), arguments, {"BLOCK": block}, num_warps=max(1, min(16, block // 512)))
