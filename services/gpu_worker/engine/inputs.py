"""From the batch and a plan to the flat token batch of a forward pass: rows that compute their last token (decode rows,
then named beams), then the chunks."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.kv_layout.api import run_shape
from kernels.paged_attention.api import prepare
from services.gpu_worker.engine.batch import Batch
from services.gpu_worker.models.model import ForwardInputs

IntArray = npt.NDArray[np.int64]

_NO_ROWS: IntArray = np.zeros(0, np.int64)


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


class Flat(NamedTuple):
    """Rows of a step, and the tokens that each of them computes."""

    rows: IntArray
    query_lens: IntArray
    """Of each row; they sum up to the number of tokens."""
    context_lens: IntArray
    row_of_token: IntArray
    positions: IntArray
    """Of each token."""


def build_inputs(
    batch: Batch, beams: IntArray, chunks: tuple[tuple[int, int], ...], k_cache: torch.Tensor
) -> StepInputs | None:
    """The step's tensors, or None if it computes nothing.

    Args:
        beams: [n] rows that were named.
        k_cache: keys of any layer.
    """
    single = np.concatenate((batch.decode_rows, beams)) if len(beams) else batch.decode_rows
    if not chunks:
        return _without_chunks(batch, single, k_cache) if len(single) else None
    rows, sizes = _columns(chunks)
    starts = batch.num_computed[rows]
    completes = starts + sizes == batch.num_tokens[rows]
    all_rows = np.concatenate((single, rows))
    query_lens = np.concatenate((np.ones(len(single), np.int64), sizes))
    context_lens = np.concatenate((batch.num_tokens[single], starts + sizes))
    flat = Flat(all_rows, query_lens, context_lens, *_flatten(all_rows, query_lens, context_lens))
    tokens = _token_ids(batch, single, rows, sizes)
    sample_at = _sample_at(len(single), sizes, completes, tokens.device)
    forward, slots = _forward_inputs(batch, flat, tokens, sample_at, k_cache)
    sampled = np.concatenate((single, rows[completes]))
    num_pairs = int(flat.positions[len(single) :].sum()) + int(sizes.sum())
    return StepInputs(forward, sampled, rows[completes], len(single), int(sizes.sum()), num_pairs, slots)


def _without_chunks(batch: Batch, single: IntArray, k_cache: torch.Tensor) -> StepInputs:
    """Most steps are such. The products have just filled the caches, so what is not done here would be slow."""
    context_lens = batch.num_tokens[single]
    flat = Flat(single, np.ones_like(single), context_lens, single, context_lens - 1)
    forward, slots = _forward_inputs(batch, flat, _last_tokens(batch, single), None, k_cache)
    return StepInputs(forward, single, _NO_ROWS, len(single), 0, 0, slots)


def _forward_inputs(
    batch: Batch, flat: Flat, token_ids: torch.Tensor, sample_at: torch.Tensor | None, k_cache: torch.Tensor
) -> tuple[ForwardInputs, IntArray]:
    """A forward pass, and the slots that it writes to."""
    block_size = run_shape(k_cache)[1]
    tables = batch.tables.of(flat.rows, -(-int(flat.context_lens.max()) // block_size))
    slots = batch.tables.slots(flat.row_of_token, flat.positions, block_size)
    forward = ForwardInputs(
        token_ids=token_ids,
        positions=torch.from_numpy(flat.positions).to(token_ids.device),
        slot_mapping=torch.from_numpy(slots).to(token_ids.device),
        attention=prepare(flat.query_lens, flat.context_lens, tables, k_cache),
        sample_at=sample_at,
    )
    return forward, slots


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
    last = _last_tokens(batch, single)
    pieces = []
    for row, size in zip(rows.tolist(), sizes.tolist(), strict=True):
        tokens, start = batch.pending[row], int(batch.num_computed[row])
        assert tokens is not None, "a row with a chunk is in prefill"
        pieces.append(tokens[start : start + size])
    return torch.cat((last, torch.from_numpy(np.concatenate(pieces)).to(device)))


def _last_tokens(batch: Batch, rows: IntArray) -> torch.Tensor:
    return batch.last_token.index_select(0, torch.from_numpy(rows).to(batch.last_token.device))


def _sample_at(
    num_single: int, sizes: IntArray, completes: npt.NDArray[np.bool_], device: torch.device
) -> torch.Tensor:
    """Places of the tokens whose successor is wanted: every single one, and the last of chunks that complete."""
    ends = num_single + np.cumsum(sizes) - 1
    return torch.from_numpy(np.concatenate((np.arange(num_single), ends[completes]))).to(device)
