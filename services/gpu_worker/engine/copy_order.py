"""Which of a plan's copies the computation must wait for, if they run beside it."""

import numpy as np
import numpy.typing as npt

from shared.messages import CopyKind

IntArray = npt.NDArray[np.int64]


class CopyOrder:
    """What a stream of copies still reads and writes.

    A copy out only reads the KV cache: a step may run beside it unless it writes to a block that is still being read.
    Everything else writes what the step may read.
    """

    def __init__(self) -> None:
        self._writes = False
        self._read: list[IntArray] = []

    def add(self, kind: CopyKind, pairs: IntArray) -> None:
        """A copy was queued; pairs [n, 2] of (source, destination)."""
        if kind is CopyKind.OUT:
            self._read.append(pairs[:, 0])
        else:
            self._writes = True

    def clear(self) -> None:
        """All of it has run, or is waited for."""
        self._writes = False
        self._read.clear()

    def holds_up(self, written: IntArray) -> bool:
        """Whether a step that writes to these blocks must wait."""
        return self._writes or any(bool(np.isin(blocks, written).any()) for blocks in self._read)
