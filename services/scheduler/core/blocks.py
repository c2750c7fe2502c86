"""The KV blocks of one worker incarnation, ref-counted.

A block is in exactly one of three places:

    free ──take──▶ in use (references: block tables) ──release──▶ free
                        └──quarantine──▶ held until a plan is answered ──settle──▶ free

Quarantine keeps the references of a table that left while plans in flight may still write through it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum


class AllocStatus(StrEnum):
    """Whether a number of blocks can be had."""

    OK = "ok"
    LATER = "later"
    """When others release theirs."""
    NEVER = "never"
    """The pool is smaller than that."""


class FreeBlocks:
    """Free block ids. Last freed, first taken; but the successor of a table's last block goes first (longer runs)."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids: dict[int, None] = dict.fromkeys(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._ids

    def take(self, after: int) -> int:
        """One free block, `after + 1` if that is free."""
        successor = after + 1
        if successor in self._ids:
            del self._ids[successor]
            return successor
        return self._ids.popitem()[0]

    def give(self, block_id: int) -> None:
        self._ids[block_id] = None

    def in_order(self) -> list[int]:
        """All ids; building a new object from them continues exactly like this one."""
        return list(self._ids)


class BlockPool:
    """Blocks `0 … num_blocks - 1` of one worker incarnation."""

    def __init__(self, num_blocks: int, free: Sequence[int] | None = None) -> None:
        self.num_blocks = num_blocks
        self._free = FreeBlocks(range(num_blocks - 1, -1, -1) if free is None else free)
        self._references = [0] * num_blocks
        self._quarantine: deque[tuple[int, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Blocks of tables that left and wait for a plan's answer."""
        return sum(len(blocks) for _, blocks in self._quarantine)

    def status(self, num_blocks: int) -> AllocStatus:
        """Whether `allocate(num_blocks)` works now, later or never."""
        if num_blocks <= len(self._free):
            return AllocStatus.OK
        return AllocStatus.LATER if num_blocks <= self.num_blocks else AllocStatus.NEVER

    def allocate(self, num_blocks: int, after: int = -2) -> list[int]:
        """`num_blocks` blocks for one table, each behind its predecessor where that is free. `status` must be OK."""
        taken = []
        for _ in range(num_blocks):
            after = self.allocate_one(after)
            taken.append(after)
        return taken

    def allocate_one(self, after: int) -> int:
        """The next block of a table that ends with block `after`."""
        block_id = self._free.take(after)
        self._references[block_id] = 1
        return block_id

    def share(self, blocks: Iterable[int]) -> None:
        """One more table refers to `blocks`."""
        for block_id in blocks:
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._references[block_id] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """A table that refers to `blocks` is gone; the last reference frees a block. Its first is taken again first."""
        for block_id in reversed(blocks):
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._references[block_id] -= 1
            if not self._references[block_id]:
                self._free.give(block_id)

    def quarantine(self, blocks: list[int], until: int) -> None:
        """Release `blocks` once plan `until` is answered. `until` never falls between calls."""
        if blocks:
            self._quarantine.append((until, blocks))

    def settle(self, answered: int) -> None:
        """All plans up to `answered` are answered."""
        while self._quarantine and self._quarantine[0][0] <= answered:
            self.release(self._quarantine.popleft()[1])

    def references(self, block_id: int) -> int:
        """Tables that refer to a block, quarantined ones included."""
        return self._references[block_id]

    def free_ids(self) -> list[int]:
        """In the order that `BlockPool(num_blocks, free)` takes."""
        return self._free.in_order()

    def quarantined(self) -> list[tuple[int, list[int]]]:
        """(plan to be answered, blocks), soonest first."""
        return list(self._quarantine)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Refer to blocks of a restored table; `free` did not list them."""
        for block_id in blocks:
            assert block_id not in self._free, f"block {block_id} is free"
            self._references[block_id] += 1
