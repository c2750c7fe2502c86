"""Where a leader stands: the core, and the ids up to which it applied its inputs. Its stored form is the snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import restore, snapshot_request_ids, take_snapshot
from shared.errors import MalformedMessage
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


class Snapshot(Message, frozen=True, tag="snapshot/1"):
    """A `Position` as it is stored."""

    tick: int
    intake_id: str
    log_id: str
    now: float
    max_model_len: int
    core: bytes
    digest: bytes
    """Of `core`: a cut or mixed value must not be loaded."""

    def request_ids(self) -> list[str]:
        """The requests whose submissions `restore` needs.

        Raises:
            UnusableSnapshot: the core's part is of another format.
        """
        return snapshot_request_ids(self.core)

    def restore(self, config: SchedulerConfig, submissions: Mapping[str, Submission]) -> Position:
        """The position that was stored.

        Raises:
            UnusableSnapshot: other format or configuration, or a submission is missing.
        """
        return Position(restore(self.core, config, submissions), self.tick, self.intake_id, self.log_id, self.now)


_decoder: Decoder[Snapshot] = Decoder(Snapshot)


def snapshot_of(position: Position) -> bytes:
    """The stored form of `position`."""
    core = take_snapshot(position.core)
    return encode(
        Snapshot(
            tick=position.tick,
            intake_id=position.intake_id,
            log_id=position.log_id,
            now=position.now,
            max_model_len=position.core.config.max_model_len,
            core=core,
            digest=_digest(core),
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


def _digest(core: bytes) -> bytes:
    return blake2b(core, digest_size=16).digest()
