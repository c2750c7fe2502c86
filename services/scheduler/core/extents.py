"""Free blocks as runs of neighbours: a table that gets one run is one copy to swap and long bursts to read.

    blocks  0 1 2 3 4 5 6 7 8 9      runs (start, length): (1, 3) and (6, 2)
            ■ □ □ □ ■ ■ □ □ ■ ■      block 4 or 5 comes back: it joins the run at its side; both: one run of 7

The runs themselves are two dicts, by start and by end. The index for the search by length is brought up to date when a
search needs it, so that a table that continues its run costs two dict operations. Which run is chosen depends on the
set of runs alone, never on how it came about.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from enum import StrEnum
from heapq import heappop, heappush

NOWHERE = -2
"""Stands for the last block of an empty table: nothing lies behind it."""


class Fit(StrEnum):
    """Which free run a table gets that cannot continue its own. Of several, the one with the lowest blocks."""

    FIRST = "first"
    """The lowest that is long enough."""
    BEST = "best"
    """The shortest that is long enough: long ones stay whole."""
    WORST = "worst"
    """The longest: the table can grow there."""


def gaps(num_blocks: int, taken: Iterable[int]) -> list[tuple[int, int]]:
    """Runs (start, length) of the blocks below `num_blocks` that are not taken."""
    runs, start = [], 0
    for block_id in sorted(taken):
        if block_id > start:
            runs.append((start, block_id - start))
        start = block_id + 1
    if start < num_blocks:
        runs.append((start, num_blocks - start))
    return runs


class FreeExtents:
    """Maximal runs of free blocks."""

    def __init__(self, runs: Iterable[tuple[int, int]], fit: Fit = Fit.FIRST) -> None:
        """`runs` are (start, length), neither overlapping nor touching."""
        self.fit = fit
        self._lengths = dict(runs)
        self._starts = {start + length: start for start, length in self._lengths.items()}
        """Start of the run that ends before this block."""
        self._num_free = sum(self._lengths.values())
        self._forget_index()

    def __len__(self) -> int:
        return self._num_free

    def runs(self) -> list[tuple[int, int]]:
        """(start, length) by start; a new object made from them continues exactly like this one."""
        return sorted(self._lengths.items())

    # ------------------------------------------------------------ taking

    def take(self, num_blocks: int, after: int = NOWHERE) -> list[int]:
        """`num_blocks` blocks, no more than are free: behind block `after` if that is free, else by fit.

        If no run is long enough, the longest is used up first: so there are few pieces.
        """
        taken = self._take_head(after + 1, num_blocks) if after + 1 in self._lengths else []
        while len(taken) < num_blocks:
            lacking = num_blocks - len(taken)
            taken += self._take_head(self._find(lacking), lacking)
        return taken

    def take_each(self, lasts: Sequence[int]) -> list[int]:
        """One block for each table that ends with block `lasts[i]`; no more than are free."""
        lengths = self._lengths
        taken = [self._take_head(last + 1, 1)[0] if last + 1 in lengths else NOWHERE for last in lasts]
        elsewhere = taken.count(NOWHERE)
        if elsewhere:
            others = iter(self.take(elsewhere))
            taken = [next(others) if block_id == NOWHERE else block_id for block_id in taken]
        return taken

    def _take_head(self, start: int, at_most: int) -> list[int]:
        length = self._lengths.pop(start)
        num_taken = min(length, at_most)
        self._num_free -= num_taken
        if num_taken == length:
            del self._starts[start + length]
        else:
            rest = start + num_taken
            self._lengths[rest] = length - num_taken
            self._starts[start + length] = rest
            self._news.append(rest)
        return list(range(start, start + num_taken))

    # ------------------------------------------------------------ giving back

    def give(self, start: int, length: int = 1) -> None:
        """Blocks `start … start + length - 1` are free now."""
        self._num_free += length
        end = start + length
        before = self._starts.pop(start, None)
        if before is not None:
            length += self._lengths.pop(before)
            start = before
        behind = self._lengths.pop(end, None)
        if behind is not None:
            length += behind
            end += behind
        self._lengths[start] = length
        self._starts[end] = start
        self._news.append(start)

    def give_all(self, blocks: Iterable[int]) -> None:
        """These blocks are free now, in any order; neighbours are given together."""
        start, length = 0, 0
        for block_id in sorted(blocks):
            if block_id != start + length:
                if length:
                    self.give(start, length)
                start, length = block_id, 0
            length += 1
        if length:
            self.give(start, length)

    # ------------------------------------------------------------ the index by length

    def _forget_index(self) -> None:
        self._by_length: dict[int, list[int]] = {}
        """Heaps of starts. They may hold runs that are gone: a start counts if its run has this length now."""
        self._known_lengths: list[int] = []
        """Sorted. Lengths of different runs add up, so these are at most √(2 · blocks)."""
        self._num_indexed = 0
        self._news = list(self._lengths)
        """Runs that are new since the last search."""

    def _find(self, num_blocks: int) -> int:
        """Start of the run to take `num_blocks` from: the chosen one of those that have as many, else the longest."""
        if self._num_indexed + len(self._news) > 4 * len(self._lengths) + 256:
            self._forget_index()
        for start in self._news:
            self._index(start)
        self._news.clear()
        self._prune_longest()
        known = self._known_lengths
        if self.fit is Fit.WORST or known[-1] <= num_blocks:
            return self._by_length[known[-1]][0]
        index = bisect_left(known, num_blocks)
        heads = []
        while index < len(known):
            head = self._head(known[index])
            if head is None:
                continue  # the length has gone from `known`: the next one is at its place
            if self.fit is Fit.BEST:
                return head
            heads.append(head)
            index += 1
        return min(heads)

    def _index(self, start: int) -> None:
        length = self._lengths.get(start)
        if length is None:
            return
        heap = self._by_length.get(length)
        if heap is None:
            heap = self._by_length[length] = []
            insort(self._known_lengths, length)
        heappush(heap, start)
        self._num_indexed += 1

    def _head(self, length: int) -> int | None:
        """The lowest run of this length; None if there is none, which is noted."""
        heap = self._by_length[length]
        while heap and self._lengths.get(heap[0]) != length:
            heappop(heap)
            self._num_indexed -= 1
        if heap:
            return heap[0]
        del self._by_length[length]
        del self._known_lengths[bisect_left(self._known_lengths, length)]
        return None

    def _prune_longest(self) -> None:
        while self._head(self._known_lengths[-1]) is None:
            pass
