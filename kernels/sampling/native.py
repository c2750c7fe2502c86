"""Sampling by the C++ kernel: no row is sorted."""

import torch

from kernels.native.library import Int, Library, Pointer


def sample(
    library: Library,
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    times: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """See api.sample; all in main memory, each row of `logits` contiguous."""
    out = torch.empty(len(times), dtype=torch.int64)
    run = library.function("pw_sample", Pointer, Int, Pointer, Int, Int, *[Pointer] * 5, Int, Pointer)
    columns = (temperature.float(), top_k.long(), top_p.float(), min_p.float(), times.double())
    held = [column.contiguous() for column in columns]
    pointers = (column.data_ptr() for column in held)
    places = None if rows is None else rows.contiguous()
    at = None if places is None else places.data_ptr()
    sizes = len(times), logits.shape[1]
    run(logits.data_ptr(), logits.stride(0), at, *sizes, *pointers, times.shape[1], out.data_ptr())
    return out
