"""Are a plan's block copies such that their order is all that matters?"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from services.gpu_worker.engine.copies import CheckedCopies
from services.gpu_worker.engine.requirements import Limits, all_within, require
from shared.messages import BlockCopies, CopyKind
from shared.packing import unpack_int32

IntArray = npt.NDArray[np.int64]


def check_copies(copies: tuple[BlockCopies, ...], limits: Limits) -> CheckedCopies:
    """The copies, unpacked.

    Raises:
        ProtocolError: a block is out of range, a kind is out of order, or copies of one kind read what they write or
            write a block twice, or IN reads what OUT writes.
    """
    if not copies:
        return ()
    kinds = [copy.kind for copy in copies]
    require(all(a < b for a, b in pairwise(kinds)), "copies are not in the order OUT, WITHIN, IN")
    checked = [(CopyKind(copy.kind), _pairs(copy, limits)) for copy in copies]
    _check_host_blocks(dict(checked))
    return checked


def _pairs(copy: BlockCopies, limits: Limits) -> IntArray:
    kind = CopyKind(copy.kind)
    require(len(copy.pairs) % 8 == 0, f"copies {kind.name} are no pairs")
    pairs = np.asarray(unpack_int32(copy.pairs), np.int64).reshape(-1, 2)
    sources, destinations = pairs[:, 0], pairs[:, 1]
    num_sources = limits.num_cpu_blocks if kind is CopyKind.IN else limits.num_blocks
    num_destinations = limits.num_cpu_blocks if kind is CopyKind.OUT else limits.num_blocks
    require(all_within(sources, num_sources), f"copies {kind.name}: a source is outside 0 to {num_sources - 1}")
    inside = all_within(destinations, num_destinations)
    require(inside, f"copies {kind.name}: a destination is outside 0 to {num_destinations - 1}")
    require(len(np.unique(destinations)) == len(pairs), f"copies {kind.name}: a destination is named twice")
    crossed = kind is CopyKind.WITHIN and np.isin(sources, destinations).any()
    require(not crossed, f"copies {kind.name}: a source is a destination")
    return pairs


def _check_host_blocks(copies: dict[CopyKind, IntArray]) -> None:
    """What IN reads must be there before the plan."""
    if CopyKind.OUT in copies and CopyKind.IN in copies:
        both = np.isin(copies[CopyKind.IN][:, 0], copies[CopyKind.OUT][:, 1])
        require(not both.any(), "a host block is written by OUT and read by IN")
