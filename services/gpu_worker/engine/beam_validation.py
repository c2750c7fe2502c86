"""Can a plan's beams be made from the batch as the plan finds it?"""

import numpy as np
import numpy.typing as npt

from services.gpu_worker.engine.batch import Batch, RowState
from services.gpu_worker.engine.requirements import Limits, require, require_row
from shared.messages import BeamRow, StepPlan

IntArray = npt.NDArray[np.int64]


def check_beams(plan: StepPlan, batch: Batch, limits: Limits) -> None:
    """Parents are beams, rows are free or beams of the same request, tokens and blocks exist.

    Raises:
        ProtocolError: names the row.
    """
    if not plan.beams:
        return
    rows = [beam.row for beam in plan.beams]
    require(len(set(rows)) == len(rows), "a row is made a beam twice")
    taken = {*plan.dropped, *(new.row for new in plan.added)}
    for beam in plan.beams:
        _check_beam(beam, batch, limits)
        require(beam.row not in taken, f"row {beam.row} is made a beam and is added or dropped too")


def _check_beam(beam: BeamRow, batch: Batch, limits: Limits) -> None:
    for row in (beam.row, beam.parent):
        require_row(row, batch)
    require(batch.state[beam.parent] == RowState.BEAM, f"row {beam.row}: its parent {beam.parent} is no beam")
    state, ids = batch.state[beam.row], batch.request_ids
    kin = state == RowState.BEAM and ids[beam.row] == ids[beam.parent]
    require(state == RowState.FREE or kin, f"row {beam.row} is made a beam but holds {ids[beam.row]}")
    require(0 <= beam.token < limits.vocab_size, f"row {beam.row}: token {beam.token} does not exist")
    require(-1 <= beam.block < limits.num_blocks, f"row {beam.row}: a block id is outside 0 to {limits.num_blocks - 1}")
    has_last = batch.tables.num_blocks[beam.parent] > 0
    require(beam.block == -1 or bool(has_last), f"row {beam.row}: its parent has no last block")


def check_places(
    beams: tuple[BeamRow, ...], batch: Batch, pairs: IntArray, capacity: IntArray, block_size: int
) -> None:
    """Every beam has a place for its token, and no two the same one.

    Args:
        beams: that `check_beams` found sound.
        pairs: [n, 2] (row, block_id) appended by the plan.
        capacity: [max_num_seqs] tokens that each row's blocks hold once the plan is applied.

    Raises:
        ProtocolError: names a row.
    """
    blocks = []
    for beam in beams:
        position = int(batch.num_tokens[beam.parent])
        require(position < capacity[beam.row], f"row {beam.row} has no block for its token")
        owned = int(batch.tables.num_blocks[beam.parent])
        table = [*batch.tables.host[beam.parent, :owned].tolist(), *pairs[pairs[:, 0] == beam.row, 1].tolist()]
        if beam.block != -1:
            table[owned - 1] = beam.block
        blocks.append(table[position // block_size])
    require(len(set(blocks)) == len(blocks), "two beams write to one block")
