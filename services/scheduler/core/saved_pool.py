"""A block pool's part of the snapshot: what its cached blocks hold, one by one, and little else.

Which blocks are free, which idle and in which order those go follows from the cached blocks and from the tables, which
come with the seats. So a block's part changes only when it is cached, hit, released, moved or evicted, and a snapshot
can be brought up to date by the parts that changed.
"""

from collections.abc import Iterable, Mapping

import msgspec

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.prefix_cache import CachedBlock
from services.scheduler.core.saved import Saved, UnusableSnapshot
from shared.packing import pack_int32, unpack_int32

GONE = b""
"""The part of a block that is not cached any more."""


class SavedPool(Saved, frozen=True):
    """One pool, without its cached blocks."""

    num_blocks: int
    num_cpu_blocks: int
    quarantine: list[tuple[int, bytes]]
    num_cached: int
    last_serial: int
    clock: int
    num_evictions: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CachedBlock)


def save_pool(pool: BlockPool) -> SavedPool:
    return SavedPool(
        num_blocks=pool.num_blocks,
        num_cpu_blocks=pool.tier.num_blocks,
        quarantine=[(until, pack_int32(blocks)) for until, blocks in pool.quarantined()],
        num_cached=len(pool.cache),
        last_serial=pool.cache.last_serial,
        clock=pool.clock,
        num_evictions=pool.num_evictions,
    )


def save_blocks(pool: BlockPool, places: Iterable[int]) -> dict[int, bytes]:
    """The parts of these places (see `CachedBlock.block_id`); `GONE` where nothing is cached."""
    at, encode = pool.cache.at, _encoder.encode
    return {place: GONE if (entry := at(place)) is None else encode(entry) for place in places}


def save_all_blocks(pool: BlockPool) -> dict[int, bytes]:
    """The parts of all cached blocks."""
    return save_blocks(pool, sorted(entry.block_id for entry in pool.cache))


def restore_pool(saved: SavedPool, blocks: Mapping[int, bytes], config: SchedulerConfig) -> BlockPool:
    """The pool; its tables are to be adopted, and then it resumes (`BlockPool.resume`).

    Raises:
        UnusableSnapshot: the blocks are not those of the pool.
    """
    pool = config.make_pool(saved.num_blocks, saved.num_cpu_blocks)
    entries = [_restore_block(place, part) for place, part in blocks.items() if part != GONE]
    places = range(-saved.num_cpu_blocks, saved.num_blocks)
    if len(entries) != saved.num_cached or not all(entry.block_id in places for entry in entries):
        raise UnusableSnapshot(f"{len(entries)} cached blocks are there, not the pool's {saved.num_cached}")
    pool.cache.restore(entries, saved.last_serial)
    pool.clock, pool.num_evictions = saved.clock, saved.num_evictions
    for until, packed in saved.quarantine:
        quarantined = list(unpack_int32(packed))
        pool.adopt(quarantined)
        pool.quarantine(quarantined, until)
    return pool


def _restore_block(place: int, part: bytes) -> CachedBlock:
    try:
        entry = _decoder.decode(part)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableSnapshot(f"the cached block at {place} is unreadable: {error}") from error
    if entry.block_id != place:
        raise UnusableSnapshot(f"the cached block at {place} belongs to {entry.block_id}")
    return entry
