"""Cached blocks that no table refers to, in the order in which they go when blocks are needed.

A table gives its deepest block up first, so that it goes before those in front of it: without them it could not be
found any more.
"""

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum
from heapq import heapify, heappop, heappush

Rank = tuple[int, int]
"""Smaller goes sooner; unique."""


class Eviction(StrEnum):
    """Which cached block goes first."""

    LRU = "lru"
    """The one that has been unreferenced longest."""
    LFU = "lfu"
    """The one with the fewest hits; of those, the one that has been unreferenced longest."""
    FIFO = "fifo"
    """The one that was unreferenced first, whatever hits it had since."""


class EvictableBlocks:
    """A priority queue from which any block can be taken."""

    def __init__(self, eviction: Eviction, ranks: Iterable[tuple[int, Rank]] = ()) -> None:
        """`ranks` are (block_id, rank), as `ranks()` gives them."""
        self.eviction = eviction
        self._ranks = OrderedDict(ranks)
        """By arrival, which under LRU is the order of ranks: no heap is needed."""
        self._heap: list[tuple[int, int, int]] = []
        """(*rank, block_id); entries of blocks that left or have another rank now are passed over."""
        self._heap_again()

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._ranks

    def add(self, block_id: int, *, now: int, entered: int, num_hits: int) -> None:
        """`now` rises with every call; `entered` was `now` when the block came here first."""
        if self.eviction is Eviction.LRU:
            self._ranks[block_id] = (0, now)
            return
        rank = (num_hits, now) if self.eviction is Eviction.LFU else (0, entered)
        self._ranks[block_id] = rank
        heappush(self._heap, (*rank, block_id))

    def discard(self, block_id: int) -> None:
        """A table refers to the block again, or it is not cached any more."""
        del self._ranks[block_id]
        if len(self._heap) > 2 * len(self._ranks) + 256:
            self._heap_again()

    def pop(self) -> int:
        """The block that goes first; there must be one."""
        if self.eviction is Eviction.LRU:
            return self._ranks.popitem(last=False)[0]
        while True:
            major, minor, block_id = heappop(self._heap)
            if self._ranks.get(block_id) == (major, minor):
                del self._ranks[block_id]
                return block_id

    def _heap_again(self) -> None:
        if self.eviction is not Eviction.LRU:
            self._heap = [(*rank, block_id) for block_id, rank in self._ranks.items()]
            heapify(self._heap)

    def ranks(self) -> list[tuple[int, Rank]]:
        """(block_id, rank), in the order of arrival; a new object made from them continues exactly like this one."""
        return list(self._ranks.items())
