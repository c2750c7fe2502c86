"""The KV blocks of one worker incarnation, ref-counted.

A block is in exactly one of four places:

    free ──allocate──▶ in use (references: block tables) ──release──▶ free, or if cached ▶ evictable ──evict──▶ free
                         │   ▲ ▲                                                              │
                         │   │ └──────────────────────────── share (a hit) ───────────────────┘
                         │   └ share (a hit)
                         └──quarantine──▶ held until a plan is answered ──settle──▶ as by release

Content of an evicted block may go on in the host pool (`cpu_tier.py`): then its entry stays in the cache, and a hit
copies it into a block again.

Quarantine keeps the references of a table that left while plans in flight may still write through it. Cached blocks are
full and never written again, so they may be shared out of quarantine.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import takewhile
from operator import attrgetter

from services.scheduler.core.copies import PlannedCopies
from services.scheduler.core.cpu_tier import CpuTier
from services.scheduler.core.evictable import EvictableBlocks, Eviction
from services.scheduler.core.extents import NOWHERE, Fit, FreeExtents, gaps
from services.scheduler.core.prefix_cache import CachedBlock, Parent, PrefixCache
from shared.messages import BlockCopies


class AllocStatus(StrEnum):
    """Whether a number of blocks can be had."""

    OK = "ok"
    LATER = "later"
    """When others release theirs."""
    NEVER = "never"
    """The pool is smaller than that."""


class Reclaim(StrEnum):
    """What becomes of a cached block that no table refers to any more."""

    LAZY = "lazy"
    """It stays cached until its room is needed."""
    IMMEDIATE = "immediate"
    """It is free at once: only requests that run at the same time share blocks."""


class BlockPool:
    """Blocks `0 … num_blocks - 1` of one worker incarnation."""

    def __init__(
        self,
        num_blocks: int,
        *,
        fit: Fit = Fit.FIRST,
        eviction: Eviction = Eviction.LRU,
        reclaim: Reclaim = Reclaim.LAZY,
        num_cpu_blocks: int = 0,
        demotion: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.reclaim = reclaim
        self.free = FreeExtents([(0, num_blocks)] if num_blocks else [], fit)
        self.evictable = EvictableBlocks(eviction)
        self.cache = PrefixCache()
        self.copies = PlannedCopies()
        """Of the plan in the making; empty between plans."""
        self.tier = CpuTier(num_cpu_blocks, self.cache, self.copies)
        self.demotion = demotion
        self.num_evictions = 0
        self.clock = 0
        """Rises with every block that becomes evictable."""
        self._references = [0] * num_blocks
        self._quarantine: deque[tuple[int, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self.free)

    @property
    def num_cached(self) -> int:
        """Blocks that no table refers to, kept for prefix hits."""
        return len(self.evictable)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self.free) + len(self.evictable)

    @property
    def num_quarantined(self) -> int:
        """Blocks of tables that left and wait for a plan's answer."""
        return sum(len(blocks) for _, blocks in self._quarantine)

    def status(self, num_blocks: int) -> AllocStatus:
        """Whether `allocate(num_blocks)` works now, later or never."""
        if num_blocks <= self.num_available:
            return AllocStatus.OK
        return AllocStatus.LATER if num_blocks <= self.num_blocks else AllocStatus.NEVER

    # ------------------------------------------------------------ tables come, grow and go

    def allocate(self, num_blocks: int, after: int = NOWHERE) -> list[int]:
        """`num_blocks` blocks for a table that ends with block `after`, as few pieces as fit. `status` must be OK."""
        self._evict_for(num_blocks)
        return self._use(self.free.take(num_blocks, after))

    def allocate_each(self, lasts: Sequence[int]) -> list[int]:
        """The next block of every table, by its last one. `status` of their number must be OK."""
        self._evict_for(len(lasts))
        return self._use(self.free.take_each(lasts))

    def _use(self, blocks: list[int]) -> list[int]:
        for block_id in blocks:
            self._references[block_id] = 1
        return blocks

    def _evict_for(self, num_blocks: int) -> None:
        """Evict until `num_blocks` are free."""
        lacking = num_blocks - len(self.free)
        if lacking > 0:
            evicted = [self.evictable.pop() for _ in range(lacking)]
            self.cache.remove(evicted[: lacking - self._demote(evicted)])
            self.free.give_all(evicted)
            self.num_evictions += lacking

    def _demote(self, evicted: Sequence[int]) -> int:
        """Let the content of evicted blocks go on in the host pool: of the last ones; of how many."""
        if not (self.demotion and self.tier.num_blocks):
            return 0
        entries = [entry for block_id in evicted if (entry := self.cache.at(block_id)) is not None]
        num_moved = self.tier.demote(entries)
        self._stamp(entries[len(entries) - num_moved :])
        return num_moved

    def share(self, blocks: Iterable[int]) -> None:
        """One more table refers to `blocks`, which are in use or cached."""
        references, idle = self._references, []
        for block_id in blocks:
            if not references[block_id]:
                idle.append(block_id)
            references[block_id] += 1
        if idle:
            self.evictable.discard(idle)

    def release(self, blocks: Sequence[int]) -> None:
        """A table that refers to `blocks` is gone; the last reference frees a block or leaves it to the cache."""
        references, idle = self._references, []
        for block_id in reversed(blocks):
            num_left = references[block_id] = references[block_id] - 1
            assert num_left >= 0, f"block {block_id} is free"
            if not num_left:
                idle.append(block_id)
        if idle:
            self._retire(idle)

    def _retire(self, idle: Sequence[int]) -> None:
        """No table refers to these blocks any more: they are free, unless the cache keeps them."""
        entries = [self.cache.at(block_id) for block_id in idle]
        cached = [entry for entry in entries if entry is not None]
        if self.reclaim is Reclaim.IMMEDIATE:
            self.cache.remove([entry.block_id for entry in cached])
            self.free.give_all(idle)
            return
        self._stamp(cached)
        self.evictable.add(cached)
        if len(cached) < len(idle):
            self.free.give_all([block_id for block_id, entry in zip(idle, entries, strict=True) if entry is None])

    def _stamp(self, entries: Sequence[CachedBlock]) -> None:
        """They are released now, one after the other."""
        for now, entry in enumerate(entries, self.clock + 1):
            entry.released = now
            if not entry.entered:
                entry.entered = now
        self.clock += len(entries)
        self.cache.touch([entry.block_id for entry in entries])

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

    # ------------------------------------------------------------ cached blocks

    def keep(self, blocks: Iterable[int], keys: Iterable[bytes], parent: Parent, contents: Iterable[bytes]) -> Parent:
        """Cache full blocks in use that follow each other behind `parent`, by key and tokens; the last serial number.

        What lies in another block already stays cached there if a table refers to it; else the new one takes over.
        """
        for block_id, key, tokens in zip(blocks, keys, contents, strict=True):
            entry = self.cache.get(key)
            if entry is None:
                parent = self.cache.add(block_id, key, parent, tokens)
            elif entry.holds(parent, tokens):
                if entry.is_demoted or entry.block_id in self.evictable:
                    self._replace(entry, block_id)
                parent = entry.serial
            else:
                self._forget(entry)
                parent = self.cache.add(block_id, key, parent, tokens)
        return parent

    def _replace(self, entry: CachedBlock, block_id: int) -> None:
        self._free_idle(entry)
        self.cache.move(entry, block_id)

    def _free_idle(self, entry: CachedBlock) -> None:
        """Free the place of an entry that no table refers to."""
        if entry.is_demoted:
            self.tier.discard(entry)
        else:
            self.evictable.discard((entry.block_id,))
            self.free.give(entry.block_id)

    def hit(self, entries: Sequence[CachedBlock]) -> list[int]:
        """A table begins with cached blocks, as far as they still are that.

        Demoted ones are copied into blocks. `status` of their number and that of the idle ones must be OK.
        """
        hits = self.cache.current(entries)
        blocks = [entry.block_id for entry in hits]
        if min(blocks, default=0) < 0:
            hits = list(takewhile(self._is_readable, hits))
            self._promote(hits)
            blocks = [entry.block_id for entry in hits]
        else:
            self.share(blocks)
        for entry in hits:
            entry.num_hits += 1
        self.cache.touch(blocks)
        return blocks

    def _promote(self, hits: Sequence[CachedBlock]) -> None:
        """One more table refers to these; the demoted ones are copied into blocks of its own."""
        demoted = [entry for entry in hits if entry.is_demoted]
        resident = [entry.block_id for entry in hits if not entry.is_demoted]
        self.share(resident)
        self.tier.claim(demoted)
        self.tier.promote(demoted, self.allocate(len(demoted), resident[-1] if resident else NOWHERE))

    def _is_readable(self, entry: CachedBlock) -> bool:
        return not entry.is_demoted or self.tier.is_readable(entry)

    def num_shared(self, entries: Iterable[CachedBlock]) -> int:
        """How many of these hits, from the first on, other tables refer to: they cost no block, whatever is evicted."""
        return sum(1 for _ in takewhile(self._is_in_use, entries))

    def _is_in_use(self, entry: CachedBlock) -> bool:
        return not entry.is_demoted and self._references[entry.block_id] > 0

    def forget(self, blocks: Iterable[int]) -> None:
        """Cache these blocks no longer: nobody shall hit them."""
        for block_id in blocks:
            entry = self.cache.at(block_id)
            if entry is not None:
                self._forget(entry)

    def _forget(self, entry: CachedBlock) -> None:
        if entry.is_demoted or entry.block_id in self.evictable:
            self._free_idle(entry)
        self.cache.remove((entry.block_id,))

    # ------------------------------------------------------------ between plans

    def take_copies(self) -> tuple[BlockCopies, ...]:
        """What the plan that is made now copies; the next one begins with none."""
        self.tier.settle()
        return self.copies.take()

    # ------------------------------------------------------------ saving

    def quarantined(self) -> list[tuple[int, list[int]]]:
        """(plan to be answered, blocks), soonest first."""
        return list(self._quarantine)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Refer to blocks of a restored table."""
        for block_id in blocks:
            self._references[block_id] += 1

    def resume(self, pinned: Iterable[int]) -> None:
        """All tables are adopted and the cache has its entries: what is idle, and what is free, follows from them.

        `pinned` are the host blocks of swapped requests.
        """
        by_release = sorted(self.cache, key=attrgetter("released"))
        idle = [entry for entry in by_release if not (entry.is_demoted or self._references[entry.block_id])]
        self.evictable.add(idle)
        used = [block_id for block_id, count in enumerate(self._references) if count]
        self.free = FreeExtents(gaps(self.num_blocks, [*used, *self.evictable]), self.free.fit)
        self.tier.resume([entry.slot for entry in by_release if entry.is_demoted], pinned)
