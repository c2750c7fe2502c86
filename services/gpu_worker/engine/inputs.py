"""From the batch and a plan to the flat token batch of a forward pass: rows that compute their last token (decode rows,
then named beams), then the chunks."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.paged_attention.api import prepare
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine.batch import Batch
from services.gpu_worker.models.model import ForwardInputs

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A forward pass and the rows that yield a token in it."""

    forward: ForwardInputs
    sampled_rows: IntArray
    """In the order of the logits."""
    completed_rows: IntArray
    """Rows whose last chunk this is; they are the end of `sampled_rows`."""
    num_single: int
    """Rows that compute one token because they decode or are beams."""
    num_chunked: int
    """Tokens of chunks."""
    num_pairs: int
    """Tokens that each of them attends to, itself included, summed up."""
    written_slots: IntArray
    """Slots of the cache that the pass writes to."""


def build_inputs(
    batch: Batch, beams: IntArray, chunks: tuple[tuple[int, int], ...], cache: KVCache
) -> StepInputs | None:
    """The step's tensors, or None if it computes nothing. `beams`: [n] rows that were named."""
    single = np.concatenate((batch.decode_rows, beams)) if len(beams) else batch.decode_rows
    if not len(single) and not chunks:
        return None
    rows, sizes = _columns(chunks)
    starts = batch.num_computed[rows]
    completes = starts + sizes == batch.num_tokens[rows]
    all_rows = np.concatenate((single, rows))
    query_lens = np.concatenate((np.ones(len(single), np.int64), sizes))
    context_lens = np.concatenate((batch.num_tokens[single], starts + sizes))
    flat_rows, positions = _flatten(all_rows, query_lens, context_lens)
    device = batch.last_token.device
    tables = batch.tables.of(all_rows, -(-int(context_lens.max()) // cache.block_size))
    slots = batch.tables.slots(flat_rows, positions, cache.block_size)
    forward = ForwardInputs(
        token_ids=_token_ids(batch, single, rows, sizes),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        attention=prepare(query_lens, context_lens, tables, cache.layer(0)[0]),
        sample_at=_sample_at(len(single), sizes, completes, device) if len(rows) else None,
    )
    sampled = np.concatenate((single, rows[completes]))
    num_pairs = int(positions[len(single) :].sum()) + int(sizes.sum())
    return StepInputs(forward, sampled, rows[completes], len(single), int(sizes.sum()), num_pairs, slots)


def _columns(chunks: tuple[tuple[int, int], ...]) -> tuple[IntArray, IntArray]:
    table = np.array(chunks, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _flatten(rows: IntArray, query_lens: IntArray, context_lens: IntArray) -> tuple[IntArray, IntArray]:
    """Row and position of every token of the flat batch."""
    ends = np.cumsum(query_lens)
    steps_from_end = np.repeat(ends, query_lens) - np.arange(ends[-1])
    return np.repeat(rows, query_lens), np.repeat(context_lens, query_lens) - steps_from_end


def _token_ids(batch: Batch, single: IntArray, rows: IntArray, sizes: IntArray) -> torch.Tensor:
    device = batch.last_token.device
    last = batch.last_token[torch.from_numpy(single).to(device)]
    if not len(rows):
        return last
    pieces = []
    for row, size in zip(rows.tolist(), sizes.tolist(), strict=True):
        tokens, start = batch.pending[row], int(batch.num_computed[row])
        assert tokens is not None, "a row with a chunk is in prefill"
        pieces.append(tokens[start : start + size])
    return torch.cat((last, torch.from_numpy(np.concatenate(pieces)).to(device)))


def _sample_at(
    num_single: int, sizes: IntArray, completes: npt.NDArray[np.bool_], device: torch.device
) -> torch.Tensor:
    """Places of the tokens whose successor is wanted: every single one, and the last of chunks that complete."""
    ends = num_single + np.cumsum(sizes) - 1
    return torch.from_numpy(np.concatenate((np.arange(num_single), ends[completes]))).to(device)
