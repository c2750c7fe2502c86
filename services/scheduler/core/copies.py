"""Blocks that the plan in the making copies before its forward pass.

The worker copies in this order, and then writes:

    OUT     KV cache → host pool     a source may be given away in the same plan
    WITHIN  KV cache → KV cache      so may this one's
    IN      host pool → KV cache     no source is a destination of OUT in the same plan

So a block that is copied away by a plan can be reused by that very plan, and a host block that is read by one can be
reused by the next.
"""

from array import array
from collections.abc import Iterable

from shared.messages import BlockCopies, CopyKind
from shared.packing import pack_int32


class PlannedCopies:
    """Copies of one plan, by kind; each kind in the order in which it was asked for."""

    def __init__(self) -> None:
        self._pairs: dict[CopyKind, array[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, kind: CopyKind, sources: Iterable[int], destinations: Iterable[int]) -> None:
        """Copy `sources[i]` to `destinations[i]`."""
        for pair in zip(sources, destinations, strict=True):
            self._pairs.setdefault(kind, array("i")).extend(pair)

    def take(self) -> tuple[BlockCopies, ...]:
        """All of them, in the order of the plan; the next plan begins with none."""
        if not self._pairs:
            return ()
        pairs, self._pairs = self._pairs, {}
        return tuple(BlockCopies(kind, pack_int32(pairs[kind])) for kind in CopyKind if kind in pairs)
