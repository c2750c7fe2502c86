"""The host blocks of one worker incarnation: what was swapped out, and what the prefix cache of the GPU gave up.

A host block is in exactly one of four places:

    free ──pin──▶ pinned (a swapped request's) ──read──▶ read by the plan in the making ──settle──▶ free
      │             └────────────── unpin ───────────────────────────────────────────────────────▶ free
      └─demote──▶ demoted ──claim (a hit)──▶ read by the plan in the making ──settle──▶ free
                    └─ the oldest, when room is needed, or discard ──▶ free

Demoted blocks stay in the one index of cached blocks (`prefix_cache.py`), so a prefix may lie in both tiers. Pinned
ones are never given to anyone else. What a plan reads or fills is not filled (again) by the same plan: its copies of
one kind may run in any order.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.copies import PlannedCopies
from services.scheduler.core.extents import FreeExtents, gaps
from services.scheduler.core.prefix_cache import CachedBlock, PrefixCache
from shared.messages import CopyKind

if TYPE_CHECKING:
    from services.scheduler.core.lane import Lane


@dataclass(slots=True, eq=False)
class SwappedOut:
    """Where the KV of a swapped request lies."""

    lane: "Lane"
    slots: list[int]
    """Host blocks, in the order of its table."""
    num_computed: int
    """Tokens whose KV is in them; the request knows at least one more."""


class CpuTier:
    """Host blocks `0 … num_blocks - 1`, called slots here."""

    def __init__(self, num_blocks: int, cache: PrefixCache, copies: PlannedCopies) -> None:
        self.num_blocks = num_blocks
        self.free = FreeExtents([(0, num_blocks)] if num_blocks else [])
        self._cache = cache
        self._copies = copies
        self._demoted: OrderedDict[int, None] = OrderedDict()
        """Oldest first."""
        self._fresh: dict[int, None] = {}
        """Demoted by the plan in the making: the last of `_demoted`."""
        self._read: list[int] = []
        """Read by the plan in the making."""
        self._num_promoted = 0

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self.free)

    @property
    def num_demoted(self) -> int:
        """Slots that hold cached blocks."""
        return len(self._demoted)

    @property
    def is_settled(self) -> bool:
        """No plan is in the making."""
        return not (self._fresh or self._read or self._copies)

    @property
    def _room(self) -> int:
        return len(self.free) + len(self._demoted) - len(self._fresh)

    # ------------------------------------------------------------ swapped requests

    def pin(self, blocks: Sequence[int]) -> list[int] | None:
        """Copy the KV blocks of a victim out, to slots that stay its own; None if there are not enough."""
        if not blocks or len(blocks) > self._room:
            return None
        slots = self._take(len(blocks))
        self._copies.add(CopyKind.OUT, blocks, slots)
        return slots

    def read(self, slots: Sequence[int], num_spared: int, blocks: Sequence[int]) -> None:
        """Copy pinned slots but the first `num_spared` into KV blocks; none of them is needed after this plan."""
        self._copies.add(CopyKind.IN, slots[num_spared:], blocks)
        self._read += slots

    def unpin(self, slots: Sequence[int]) -> None:
        """Nobody comes back for them."""
        self.free.give_all(slots)

    # ------------------------------------------------------------ cached blocks

    def demote(self, entries: Sequence[CachedBlock]) -> int:
        """Move evicted blocks here, the last ones if not all have room; how many there were.

        They come as they were evicted. Slots follow the order of the blocks, so that neighbours are copied together.
        """
        num_moved = min(len(entries), self._room)
        if not num_moved:
            return 0
        moved = entries[len(entries) - num_moved :]
        sources = sorted(entry.block_id for entry in moved)
        slots = self._take(num_moved)
        self._copies.add(CopyKind.OUT, sources, slots)
        slot_of = dict(zip(sources, slots, strict=True))
        for entry in moved:
            slot = slot_of[entry.block_id]
            self._cache.move(entry, ~slot)
            self._demoted[slot] = self._fresh[slot] = None
        return num_moved

    def is_readable(self, entry: CachedBlock) -> bool:
        """Whether the plan in the making can read a demoted block: not if it puts it there itself."""
        return entry.slot not in self._fresh

    def claim(self, entries: Iterable[CachedBlock]) -> None:
        """These are hit: room for others must not cost them their place."""
        for entry in entries:
            del self._demoted[entry.slot]
            self._read.append(entry.slot)

    def promote(self, entries: Sequence[CachedBlock], blocks: Sequence[int]) -> None:
        """Copy claimed blocks into KV blocks, which take the entries over."""
        self._copies.add(CopyKind.IN, [entry.slot for entry in entries], blocks)
        for entry, block_id in zip(entries, blocks, strict=True):
            self._cache.move(entry, block_id)
            entry.entered = 0
        self._num_promoted += len(entries)

    def discard(self, entry: CachedBlock) -> None:
        """A demoted block is not needed any more; its entry is the caller's."""
        del self._demoted[entry.slot]
        self.free.give(entry.slot)
        entry.entered = 0

    def _take(self, num_blocks: int) -> list[int]:
        """Slots, as few runs as fit; the oldest demoted blocks go for them."""
        gone = [self._demoted.popitem(last=False)[0] for _ in range(num_blocks - len(self.free))]
        self._cache.remove(~slot for slot in gone)
        self.free.give_all(gone)
        return self.free.take(num_blocks)

    # ------------------------------------------------------------ between plans

    def tally(self) -> tuple[int, int]:
        """Blocks that the plan in the making (demotes, promotes)."""
        return len(self._fresh), self._num_promoted

    def settle(self) -> None:
        """The plan is made: what it reads is free for the next one."""
        if self._read:
            self.free.give_all(self._read)
            self._read.clear()
        self._fresh.clear()
        self._num_promoted = 0

    def demoted(self) -> list[int]:
        """Slots of demoted blocks, oldest first."""
        return list(self._demoted)

    def resume(self, demoted: Sequence[int], pinned: Iterable[int]) -> None:
        """Continue as the tier did that had these; `demoted` ones oldest first, the cache holds their entries."""
        self._demoted = OrderedDict.fromkeys(demoted)
        self.free = FreeExtents(gaps(self.num_blocks, [*demoted, *pinned]))
