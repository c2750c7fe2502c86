"""What the checks of a plan share."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.gpu_worker.engine.batch import Batch
from shared.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that a plan must keep to."""

    num_blocks: int
    num_cpu_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int


def all_within(values: npt.NDArray[np.int64], limit: int) -> bool:
    """Whether all of `values` are in 0 … limit - 1."""
    return bool(((values >= 0) & (values < limit)).all())


def require_row(row: int, batch: Batch) -> None:
    """The batch has that row."""
    require(0 <= row < batch.num_rows, f"row {row} is outside 0 to {batch.num_rows - 1}")


def require(condition: bool, message: str) -> None:
    """Raise `ProtocolError(message)` unless `condition` holds."""
    if not condition:
        raise ProtocolError(message)
