"""Public entry of block copies: between the KV cache and a host pool of the same layout, or within one of them.

A block is one run of memory (services/gpu_worker/cache/kv_cache.py) and neighbouring blocks are neighbours in memory,
so pairs whose sources and destinations both follow each other are moved by one copy. That is what makes contiguous
block tables pay: a swap of n blocks is one copy at best and n copies at worst. Measured on 2 cores that were busy with
other work too: 5.1 GB/s together and 1.6 scattered for blocks of 737 kB, 5.7 and 0.9 GB/s for blocks of 8 kB.
"""

import numpy as np
import numpy.typing as npt
import torch

from kernels.block_copy import reference
from kernels.checks import require
from kernels.launch import runs_triton

__all__ = ["copy_blocks", "find_runs"]

IntArray = npt.NDArray[np.int64]

_SMALL_RUN = 1 << 20
"""Bytes. On a GPU, runs that are shorter on average are copied by one kernel: a copy engine spends some microseconds on
each, in which a bus of 50 GB/s carries 100 kB or more. Chosen from that, not measured."""


def copy_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: IntArray) -> int:
    """Copy whole blocks. On CUDA the copies are queued on the current stream and not waited for.

    Args:
        source, destination: [num_blocks, …], contiguous, the same block shape and dtype; may be one tensor. A host
            tensor that is copied from or to a GPU should be pinned, else the copy waits.
        pairs: [n, 2] (source block, destination block), host; no destination twice.

    Returns:
        The number of copies that it took.

    Raises:
        ValueError: shapes or dtypes do not fit, a block is out of range, a destination is named twice, or a block of
            one tensor is both source and destination.
    """
    require(pairs.ndim == 2 and pairs.shape[1] == 2, f"copy_blocks: pairs {pairs.shape}")
    alike = source.dim() > 1 and source.shape[1:] == destination.shape[1:] and source.dtype == destination.dtype
    require(alike, f"copy_blocks: {tuple(source.shape)} {source.dtype} to {tuple(destination.shape)}")
    require(source.is_contiguous() and destination.is_contiguous(), "copy_blocks: a tensor is not contiguous")
    if not len(pairs):
        return 0
    sources, destinations = pairs[:, 0], pairs[:, 1]
    inside = pairs.min() >= 0 and sources.max() < len(source) and destinations.max() < len(destination)
    require(bool(inside), f"copy_blocks: a block is out of range: {len(source)} to {len(destination)} blocks")
    require(len(np.unique(destinations)) == len(pairs), "copy_blocks: a destination is named twice")
    one_memory = source.data_ptr() == destination.data_ptr()
    require(not (one_memory and np.isin(sources, destinations).any()), "copy_blocks: a source is a destination")
    runs = find_runs(pairs)
    on_gpu = runs_triton(source) or runs_triton(destination)
    are_small = source[0].nbytes * len(pairs) < _SMALL_RUN * len(runs)
    if on_gpu and len(runs) > 1 and are_small and _is_mapped(source, destination):
        from kernels.block_copy import triton

        triton.copy_pairs(source, destination, pairs)
        return 1
    reference.copy_runs(source, destination, runs)
    return len(runs)


def _is_mapped(*tensors: torch.Tensor) -> bool:
    """Whether a GPU can address all of them."""
    return all(tensor.device.type == "cuda" or tensor.is_pinned() for tensor in tensors)


def find_runs(pairs: IntArray) -> IntArray:
    """Merge neighbouring pairs that go on where the one before ended, in source and in destination.

    Args:
        pairs: [n, 2] (source, destination).

    Returns:
        [m, 3] (first source, first destination, length), in the order of `pairs`.
    """
    if not len(pairs):
        return np.zeros((0, 3), np.int64)
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.concatenate((starts, [len(pairs)])))
    return np.column_stack((pairs[starts], lengths))
