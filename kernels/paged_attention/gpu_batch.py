"""What a step's attention on a GPU needs to know of its rows: a handful of small tensors, no index of every slot."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GpuBatch:
    """Rows of a step. All tensors are int32 on the device; lengths may change in place as long as the bounds hold: a
    captured graph relies on it."""

    num_tokens: int
    query_starts: torch.Tensor
    """[num_rows]: place of the row's first query in the flat batch."""
    query_lens: torch.Tensor
    """[num_rows]."""
    context_lens: torch.Tensor
    """[num_rows]; 0 for a row that stands for none: it gives zeros."""
    singles: torch.Tensor
    """[n] rows with one query."""
    chunks: torch.Tensor
    """[m] rows with several."""
    block_tables: torch.Tensor
    """[num_rows, max_blocks]."""
    longest_context: int
    """Bound of the contexts of `singles`."""
    longest_chunk: int
    """Bound of the query lengths of `chunks`."""


def prepare(query_lens: IntArray, context_lens: IntArray, block_tables: torch.Tensor) -> GpuBatch:
    """See api.prepare. One transfer to the device."""
    starts = np.cumsum(query_lens) - query_lens
    singles, chunks = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    columns = (starts, query_lens, context_lens, singles, chunks)
    packed = torch.from_numpy(np.concatenate(columns).astype(np.int32)).to(block_tables.device, non_blocking=True)
    on_device = packed.split([len(column) for column in columns])
    return GpuBatch(
        num_tokens=int(query_lens.sum()),
        query_starts=on_device[0],
        query_lens=on_device[1],
        context_lens=on_device[2],
        singles=on_device[3],
        chunks=on_device[4],
        block_tables=block_tables,
        longest_context=int(context_lens[singles].max(initial=0)),
        longest_chunk=int(query_lens[chunks].max(initial=0)),
    )
