"""What a forward pass yielded, in columns."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.gpu_worker.engine.beams import BeamOutcome
from shared.packing import NO_TOKEN

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class Outcome:
    """One entry per row that was sampled; beams apart."""

    rows: IntArray
    tokens: IntArray
    output_index: IntArray
    """Of the new token within the row's output."""
    ok: npt.NDArray[np.bool_]
    """False: the row yielded nothing usable and ends with an error."""
    reasons: IntArray
    """`EndReason`, 0 for rows that run on."""
    joined: tuple[tuple[int, str, int], ...] = ()
    """(row, request_id, output index) of rows that yield for the first time since they were added."""
    logprobs: tuple[tuple[int, float], ...] = ()
    """(row, log-probability of its token) of rows that ask for it and yielded."""
    beams: BeamOutcome = field(default_factory=BeamOutcome)

    @property
    def ended(self) -> tuple[tuple[int, int], ...]:
        """(row, EndReason) of rows that end."""
        at = np.flatnonzero(self.reasons)
        return tuple(zip(self.rows[at].tolist(), self.reasons[at].tolist(), strict=True))

    def packed(self) -> bytes:
        """Tokens as little-endian int32 indexed by row, up to the last row that yielded."""
        rows = self.rows[self.ok]
        if not len(rows):
            return b""
        by_row = np.full(int(rows.max()) + 1, NO_TOKEN, "<i4")
        by_row[rows] = self.tokens[self.ok]
        return by_row.tobytes()


def nothing() -> Outcome:
    """The outcome of a step that sampled no row."""
    none = np.zeros(0, np.int64)
    return Outcome(none, none, none, none.astype(np.bool_), none)
