"""Block copies on a GPU in one launch, whatever the number of runs.

Either side may be pinned memory of the host, which a GPU addresses by itself. That pays for many small runs: a copy
engine is told of each one.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kernels.launch import Launch

_BLOCK = 2048
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit
def copy_kernel(
    destination,  # [num_blocks, words]
    source,  # [num_blocks, words]
    pairs,  # [n, 2] source block, destination block
    words,
    BLOCK: tl.constexpr,
):
    """A piece of one pair. Grid: pairs, pieces of a block."""
    pair = tl.program_id(0)
    from_block = tl.load(pairs + 2 * pair).to(tl.int64)
    to_block = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    tl.store(destination + to_block * words + at, tl.load(source + from_block * words + at, mask=inside), mask=inside)


def copy_pairs(source: torch.Tensor, destination: torch.Tensor, pairs: npt.NDArray[np.int64]) -> None:
    """Copy blocks [n, 2] (source, destination); see api.copy_blocks. Not waited for."""
    device = source.device if source.device.type == "cuda" else destination.device
    launch(source, destination, torch.from_numpy(pairs).to(device, non_blocking=True)).run()


def launch(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> Launch:
    """The kernel that copies `pairs` [n, 2] int64, on the device; both tensors are contiguous."""
    size = source[0].nbytes
    word = next(dtype for dtype in _WORDS if size % dtype.itemsize == 0)
    words = size // word.itemsize
    arguments = {
        "destination": destination.view(len(destination), -1).view(word),
        "source": source.view(len(source), -1).view(word),
        "pairs": pairs,
        "words": words,
    }
    return Launch(copy_kernel, (len(pairs), triton.cdiv(words, _BLOCK)), arguments, {"BLOCK": _BLOCK})
