"""Cached blocks that no table refers to, in the order in which they go when blocks are needed.

A table gives its deepest block up first, so that it goes before those in front of it: without them it could not be
found any more.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from enum import StrEnum
from heapq import heapify, heappop, heappush

from services.scheduler.core.prefix_cache import CachedBlock


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

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction
        self._entries: OrderedDict[int, CachedBlock] = OrderedDict()
        """By block, as they came: in the order of `released`, which is that of LRU, so that it needs no heap."""
        self._heap: list[tuple[int, int, int]] = []
        """(*rank, block_id); what stands for blocks that left or have another rank now is passed over."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def __iter__(self) -> Iterator[int]:
        """Blocks, as they came."""
        return iter(self._entries)

    def add(self, entries: Iterable[CachedBlock]) -> None:
        """No table refers to their blocks any more; `released` rises with every entry."""
        for entry in entries:
            self._entries[entry.block_id] = entry
            if self.eviction is not Eviction.LRU:
                heappush(self._heap, (*self._rank(entry), entry.block_id))

    def discard(self, blocks: Iterable[int]) -> None:
        """Tables refer to these blocks again, or they are not cached any more."""
        for block_id in blocks:
            del self._entries[block_id]
        if len(self._heap) > 2 * len(self._entries) + 256:
            self._heap = [(*self._rank(entry), block_id) for block_id, entry in self._entries.items()]
            heapify(self._heap)

    def pop(self) -> int:
        """The block that goes first; there must be one."""
        if self.eviction is Eviction.LRU:
            return self._entries.popitem(last=False)[0]
        while True:
            *rank, block_id = heappop(self._heap)
            entry = self._entries.get(block_id)
            if entry is not None and list(self._rank(entry)) == rank:
                del self._entries[block_id]
                return block_id

    def _rank(self, entry: CachedBlock) -> tuple[int, int]:
        """Smaller goes sooner; unique, and constant while the entry is here."""
        return (entry.num_hits, entry.released) if self.eviction is Eviction.LFU else (0, entry.entered)
