"""Where a leader stands: the core, and the ids up to which it applied its inputs. Its stored form is the snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import redis

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import Incarnation, SavedCore, restore_core, save_core
from services.scheduler.service import logs
from shared.errors import MalformedMessage, ProtocolError
from shared.keys import Keys
from shared.messages import Decoder, Message, Submission, encode
from shared.streams import START


@dataclass(slots=True)
class Position:
    """The core after tick `tick`."""

    core: SchedulerCore
    tick: int = 0
    intake_id: str = START
    """Intake is applied up to here."""
    log_id: str = START
    """The step log is applied up to here."""
    now: float = 0.0
    """Time of the tick; never falls."""
    blocks_saved: dict[Incarnation, int] = field(default_factory=dict)
    """The tick at which the cached blocks of each incarnation were saved last; 0: they were not yet."""


class Snapshot(Message, frozen=True, tag="snapshot/1"):
    """A `Position` as it is stored, but for the cached blocks."""

    tick: int
    intake_id: str
    log_id: str
    now: float
    max_model_len: int
    core: bytes
    digest: bytes
    """Of `core`: a cut value must not be loaded."""
    blocks_saved: tuple[tuple[str, int, int], ...] = ()
    """(worker, incarnation, tick): as in `Position`."""

    def restore(
        self,
        core: SavedCore,
        blocks: Mapping[Incarnation, Mapping[int, bytes]],
        config: SchedulerConfig,
        submissions: Mapping[str, Submission],
    ) -> Position:
        """The position that was stored. `core` is what `read_core` makes of the bytes.

        Raises:
            UnusableSnapshot: other configuration, or a submission or a block is missing.
        """
        return Position(
            core=restore_core(core, blocks, config, submissions),
            tick=self.tick,
            intake_id=self.intake_id,
            log_id=self.log_id,
            now=self.now,
            blocks_saved={(worker, number): tick for worker, number, tick in self.blocks_saved},
        )


_decoder: Decoder[Snapshot] = Decoder(Snapshot)


def snapshot_of(position: Position) -> bytes:
    """The stored form of `position`, but for the cached blocks."""
    core = save_core(position.core)
    return encode(
        Snapshot(
            tick=position.tick,
            intake_id=position.intake_id,
            log_id=position.log_id,
            now=position.now,
            max_model_len=position.core.config.max_model_len,
            core=core,
            digest=_digest(core),
            blocks_saved=tuple((*incarnation, tick) for incarnation, tick in position.blocks_saved.items()),
        )
    )


def decode_snapshot(data: bytes) -> Snapshot:
    """A stored snapshot.

    Raises:
        ProtocolError: it is damaged or of another version.
    """
    snapshot: Snapshot = _decoder.decode(data)
    if _digest(snapshot.core) != snapshot.digest:
        raise MalformedMessage("the snapshot's digest does not match")
    return snapshot


def read_snapshot(client: redis.Redis, keys: Keys) -> Snapshot | None:
    """The stored snapshot; None if there is none that can be read.

    Raises:
        RedisFailure: Redis did not answer.
    """
    data: Any = client.get(keys.snapshot)
    if data is None:
        return None
    try:
        return decode_snapshot(data)
    except ProtocolError as error:
        logs.warning("snapshot_unusable", reason=str(error))
        return None


def _digest(core: bytes) -> bytes:
    return blake2b(core, digest_size=16).digest()
