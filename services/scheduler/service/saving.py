"""The snapshot as it is stored: the position in one key, and per worker incarnation a hash of its cached blocks.

A save writes the position and the blocks that changed since the last one, in the commit of one tick: what is stored is
always the state at one tick. Each hash also holds the tick at which it was written last, and the position says which
that must be, so that a mixture of two saves is never loaded.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import redis

from services.scheduler.core.saved import UnusableSnapshot
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import Incarnation, incarnations, num_changed_blocks, save_changed_blocks
from services.scheduler.service.position import Position, Snapshot, snapshot_of
from shared.keys import Keys
from shared.records import LIVE_TTL_S
from shared.scripts import MAX_FIELDS, Operation, SetFields, SetValue

MANY_BLOCKS = 1000
"""About 2 ms of the leader's turn."""
BLOCKS_PER_REQUEST = 6
"""What a save writes of a live request costs as much as so many blocks."""

_TICK = "tick"


def is_much_unsaved(core: SchedulerCore) -> bool:
    """Whether a save should not wait for its time: more blocks changed than the rest of a save is worth."""
    return num_changed_blocks(core) > MANY_BLOCKS + BLOCKS_PER_REQUEST * len(core.requests)


def save_operations(keys: Keys, position: Position) -> list[Operation]:
    """What brings the stored snapshot up to `position`."""
    changed, before = save_changed_blocks(position.core), position.blocks_saved
    position.blocks_saved = {
        incarnation: position.tick if incarnation in changed else before.get(incarnation, 0)
        for incarnation in incarnations(position.core)
    }
    operations: list[Operation] = [SetValue(keys.snapshot, snapshot_of(position), LIVE_TTL_S)]
    for incarnation, parts in changed.items():
        fields = {str(place): part for place, part in parts.items()} | {_TICK: str(position.tick).encode()}
        operations += [SetFields(keys.cached_blocks(*incarnation), piece, LIVE_TTL_S) for piece in _pieces(fields)]
    return operations


def _pieces(fields: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    items = iter(fields.items())
    while piece := dict(islice(items, MAX_FIELDS)):
        yield piece


def read_blocks(client: redis.Redis, keys: Keys, snapshot: Snapshot) -> dict[Incarnation, dict[int, bytes]]:
    """The cached blocks that belong to a stored snapshot.

    Raises:
        UnusableSnapshot: the blocks are of another save.
        RedisFailure: Redis did not answer.
    """
    found: dict[Incarnation, dict[int, bytes]] = {}
    for worker, number, tick in snapshot.blocks_saved:
        fields: Any = client.hgetall(keys.cached_blocks(worker, number))
        saved = int(fields.pop(_TICK.encode(), b"0"))
        if saved != tick:
            raise UnusableSnapshot(f"the blocks of {worker} were saved at tick {saved}, not {tick}")
        found[worker, number] = {int(place): part for place, part in fields.items()}
    return found
