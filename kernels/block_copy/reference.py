"""Block copies in torch: one `copy_` per run."""

import numpy as np
import numpy.typing as npt
import torch


def copy_runs(source: torch.Tensor, destination: torch.Tensor, runs: npt.NDArray[np.int64]) -> None:
    """Copy runs [m, 3] (first source, first destination, length) of blocks; runs of one tensor do not overlap."""
    for first, to, length in runs.tolist():
        destination[to : to + length].copy_(source[first : first + length], non_blocking=True)
