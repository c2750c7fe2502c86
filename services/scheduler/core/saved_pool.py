"""A block pool's part of the snapshot: free runs, quarantine and the prefix cache, in columns.

Tables are not in it: they come with the seats, which adopt their blocks.
"""

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.evictable import EvictableBlocks
from services.scheduler.core.extents import FreeExtents
from services.scheduler.core.prefix_cache import KEY_SIZE, CachedBlock, Parent
from shared.packing import pack_int32, unpack_int32


class SavedPool(msgspec.Struct, frozen=True, array_like=True):
    """One pool."""

    num_blocks: int
    free: bytes
    """Packed pairs (start, length)."""
    quarantine: list[tuple[int, bytes]]
    cached: bytes
    """Packed places (see `CachedBlock.block_id`), in the order of the cache; the next columns follow it."""
    keys: bytes
    tokens: bytes
    parents: list[Parent]
    serials: list[int]
    num_hits: list[int]
    entered: list[int]
    evictable: list[tuple[int, tuple[int, int]]]
    """(block_id, rank)"""
    last_serial: int
    clock: int
    num_evictions: int
    num_cpu_blocks: int
    cpu_free: bytes
    """Packed pairs (start, length)."""
    demoted: bytes
    """Packed host blocks, oldest first."""


def save_pool(pool: BlockPool) -> SavedPool:
    entries = list(pool.cache)
    return SavedPool(
        num_blocks=pool.num_blocks,
        free=_pack_runs(pool.free),
        quarantine=[(until, pack_int32(blocks)) for until, blocks in pool.quarantined()],
        cached=pack_int32([entry.block_id for entry in entries]),
        keys=b"".join([entry.key for entry in entries]),
        tokens=b"".join([entry.tokens for entry in entries]),
        parents=[entry.parent for entry in entries],
        serials=[entry.serial for entry in entries],
        num_hits=[entry.num_hits for entry in entries],
        entered=[entry.entered for entry in entries],
        evictable=pool.evictable.ranks(),
        last_serial=pool.cache.last_serial,
        clock=pool.clock,
        num_evictions=pool.num_evictions,
        num_cpu_blocks=pool.tier.num_blocks,
        cpu_free=_pack_runs(pool.tier.free),
        demoted=pack_int32(pool.tier.demoted()),
    )


def restore_pool(saved: SavedPool, config: SchedulerConfig) -> BlockPool:
    pool = config.make_pool(saved.num_blocks, saved.num_cpu_blocks)
    pool.free = FreeExtents(_unpack_runs(saved.free), config.fit)
    pool.evictable = EvictableBlocks(config.eviction, saved.evictable)
    pool.cache.restore(_entries(saved, config), saved.last_serial)
    pool.tier.restore(_unpack_runs(saved.cpu_free), unpack_int32(saved.demoted))
    pool.clock, pool.num_evictions = saved.clock, saved.num_evictions
    for until, packed in saved.quarantine:
        blocks = list(unpack_int32(packed))
        pool.adopt(blocks)
        pool.quarantine(blocks, until)
    return pool


def _pack_runs(extents: FreeExtents) -> bytes:
    return pack_int32(value for run in extents.runs() for value in run)


def _unpack_runs(packed: bytes) -> Iterable[tuple[int, int]]:
    numbers = unpack_int32(packed)
    return zip(numbers[::2], numbers[1::2], strict=True)


def _entries(saved: SavedPool, config: SchedulerConfig) -> Iterable[CachedBlock]:
    columns = zip(
        unpack_int32(saved.cached),
        _cut(saved.keys, KEY_SIZE),
        saved.parents,
        saved.serials,
        _cut(saved.tokens, 4 * config.block_size),
        saved.num_hits,
        saved.entered,
        strict=True,
    )
    return (CachedBlock(*values) for values in columns)


def _cut(data: bytes, size: int) -> Iterable[bytes]:
    return (data[start:stop] for start, stop in pairwise(range(0, len(data) + 1, size)))
