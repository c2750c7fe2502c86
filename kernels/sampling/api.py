"""Public entry of sampling: one token per row, drawn from its softmax after the filters.

min_p on the whole distribution, then top_k, then top_p on what is left, renormalised. Tokens with equal logits are kept
or dropped together, so the result does not depend on how ties are broken. The draw is a race, whose random numbers come
from the caller (race.py): the same on every device.
"""

import torch

from kernels.checks import library_for, require
from kernels.launch import runs_triton
from kernels.sampling import native, reference
from kernels.sampling.race import FAN_OUT, num_levels

__all__ = ["FAN_OUT", "num_levels", "sample"]

_TRITON_LEVELS = 3


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    times: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw.

    Args:
        logits: [n, vocab_size] float32, finite or -inf. A row with others yields any token. With `rows`, those are the
            n rows to draw from, of [any, vocab_size].
        temperature: [n] float32, above 0.
        top_k: [n] int64; 0 or less keeps all.
        top_p: [n] float32 in (0, 1]; 1 keeps all.
        min_p: [n] float32 in [0, 1]; 0 keeps all.
        times: [n, num_levels(vocab_size), FAN_OUT] float64, positive: independent exponential variables of rate 1.
        rows: [n] int64; None for all in order.

    Returns:
        [n] int64.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    require(logits.dim() == 2 and logits.dtype == torch.float32, f"sample: logits {tuple(logits.shape)} {logits.dtype}")
    columns = (temperature, top_k, top_p, min_p)
    count = len(logits if rows is None else rows)
    require(all(column.shape == (count,) for column in columns), "sample: one parameter of a kind per row")
    wanted = (count, num_levels(logits.shape[1]), FAN_OUT)
    require(times.shape == wanted, f"sample: times {tuple(times.shape)}, expected {wanted}")
    require(rows is None or rows.dtype == torch.int64, "sample: rows must be int64")
    on_device = all(tensor.device == logits.device for tensor in (*columns, times))
    require(on_device, "sample: tensors differ in device")
    library = library_for(logits)
    if library is not None:
        return native.sample(library, logits, temperature, top_k, top_p, min_p, times, rows=rows)
    if rows is not None:
        logits = logits[rows]
    if runs_triton(logits) and times.shape[1] <= _TRITON_LEVELS:
        from kernels.sampling import triton

        return triton.sample(logits, temperature, top_k, top_p, min_p, times)
    return reference.sample(logits, temperature, top_k, top_p, min_p, times)
