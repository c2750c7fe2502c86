"""Is a plan one that the protocol allows on this batch? Checked before anything changes: a plan that would read or
write memory that it must not ends the incarnation instead."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.gpu_worker.engine.batch import Batch, RowState
from services.gpu_worker.engine.beam_validation import check_beams, check_places
from services.gpu_worker.engine.copies import CheckedCopies
from services.gpu_worker.engine.copy_validation import check_copies
from services.gpu_worker.engine.requirements import Limits, all_within, require, require_row
from shared.errors import ProtocolError
from shared.messages import NewRow, StepPlan
from shared.packing import unpack_int32

IntArray = npt.NDArray[np.int64]

_NO_PAIRS: IntArray = np.zeros((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class Checked:
    """Parts of a plan, unpacked."""

    pairs: IntArray
    """(row, block_id) for rows that are in the batch once the plan is applied, [n, 2]. Pairs for rows that the worker
    itself ended are left out: the plan was made before that was known."""
    copies: CheckedCopies


def check_plan(plan: StepPlan, batch: Batch, *, expected_id: int, limits: Limits) -> Checked:
    """Check a plan against the batch as the plan finds it.

    Raises:
        ProtocolError: says which plan and what is wrong with it.
    """
    try:
        require(plan.plan_id == expected_id, f"expected plan {expected_id}")
        added = _check_rows(plan, batch)
        copies = check_copies(plan.copies, limits)
        check_beams(plan, batch, limits)
        pairs = _live_pairs(plan, batch, added, limits.num_blocks)
        _check_cover(plan, batch, added, pairs, limits)
    except ProtocolError as error:
        raise ProtocolError(f"plan {plan.plan_id}: {error}") from None
    return Checked(pairs, copies)


def _check_rows(plan: StepPlan, batch: Batch) -> dict[int, NewRow]:
    for row in plan.dropped:
        require_row(row, batch)
    added = {new.row: new for new in plan.added}
    require(len(added) == len(plan.added), "a row is added twice")
    for row, new in added.items():
        require_row(row, batch)
        require(batch.state[row] == RowState.FREE, f"row {row} is added but holds {batch.request_ids[row]}")
        _check_new_row(new)
    return added


def _check_new_row(new: NewRow) -> None:
    require(len(new.tokens) % 4 == 0, f"row {new.row}: {len(new.tokens)} bytes are no tokens")
    num_tokens = len(new.tokens) // 4
    prompt, computed = new.num_prompt_tokens, new.num_computed_tokens
    require(1 <= prompt <= num_tokens, f"row {new.row}: {prompt} prompt tokens of {num_tokens}")
    require(0 <= computed < num_tokens, f"row {new.row}: {computed} tokens computed of {num_tokens}")


def _live_pairs(plan: StepPlan, batch: Batch, added: dict[int, NewRow], num_blocks: int) -> IntArray:
    if not plan.blocks:
        return _NO_PAIRS
    require(len(plan.blocks) % 8 == 0, "blocks are no pairs")
    pairs = np.asarray(unpack_int32(plan.blocks), np.int64).reshape(-1, 2)
    rows, blocks = pairs[:, 0], pairs[:, 1]
    require(all_within(rows, batch.num_rows), f"blocks name a row outside 0 to {batch.num_rows - 1}")
    require(all_within(blocks, num_blocks), f"a block id is outside 0 to {num_blocks - 1}")
    live = batch.state != RowState.FREE
    live[list(plan.dropped)] = False
    live[list(added)] = True
    live[[beam.row for beam in plan.beams]] = True
    return pairs[live[rows]]


def _check_cover(plan: StepPlan, batch: Batch, added: dict[int, NewRow], pairs: IntArray, limits: Limits) -> None:
    """Every token that the step computes must have a place in its row's blocks, and none be past the longest row."""
    owned = _owned_blocks(plan, batch, added, pairs)
    capacity = np.minimum(owned * limits.block_size, limits.max_model_len)  # the last block may reach further
    check_places(plan.beams, batch, pairs, capacity, limits.block_size)
    decode = batch.decode_rows
    for row in decode[batch.num_tokens[decode] > capacity[decode]].tolist():
        require(row in plan.dropped, f"row {row} has no block for its last token")
    require(len(dict(plan.chunks)) == len(plan.chunks), "a row has two chunks")
    for row, size in plan.chunks:
        require_row(row, batch)
        computed, known = _progress(row, batch, added, plan)
        end = computed + size
        require(size >= 1 and end <= known, f"row {row}: chunk of {size} after {computed} of {known} tokens")
        require(end <= capacity[row], f"row {row}: chunk up to token {end}, blocks for {capacity[row]}")


def _owned_blocks(plan: StepPlan, batch: Batch, added: dict[int, NewRow], pairs: IntArray) -> IntArray:
    """Blocks of each row once the plan is applied."""
    if not (added or plan.beams or len(pairs)):
        return batch.tables.num_blocks
    owned = batch.tables.num_blocks.copy()
    owned[list(added)] = 0
    for beam in plan.beams:
        owned[beam.row] = batch.tables.num_blocks[beam.parent]
    np.add.at(owned, pairs[:, 0], 1)
    require(bool((owned <= batch.tables.max_blocks).all()), f"a row owns more than {batch.tables.max_blocks} blocks")
    return owned


def _progress(row: int, batch: Batch, added: dict[int, NewRow], plan: StepPlan) -> tuple[int, int]:
    """Computed and known tokens of a row in prefill."""
    if row in added:
        return added[row].num_computed_tokens, len(added[row].tokens) // 4
    in_prefill = batch.state[row] == RowState.PREFILL and row not in plan.dropped
    require(in_prefill, f"row {row} has a chunk but is not in prefill")
    return int(batch.num_computed[row]), int(batch.num_tokens[row])
