"""What the leader reads: intake and step log, decoded, in order, with the ids up to which they were read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import redis

from services.scheduler.service import logs
from shared.channel import Channel, Command
from shared.errors import ProtocolError
from shared.keys import Keys
from shared.messages import Decoder, IntakeMessage, LogMessage, StepResult
from shared.records import LIVE_TTL_S
from shared.redis_client import RedisFailure
from shared.streams import Entry, raw_entries, xread

PAGE = 1000
"""Most entries per stream and read."""
DEAD_LETTERS = 1000
"""Entries that a dead-letter stream keeps."""

_intake: Decoder[IntakeMessage] = Decoder(IntakeMessage)
_log: Decoder[LogMessage] = Decoder(LogMessage)


def decode_log(payload: bytes) -> LogMessage:
    """One message of the step log.

    Raises:
        ProtocolError: not a sound message that this version reads.
    """
    message: LogMessage = _log.decode(payload)
    if isinstance(message, StepResult) and len(message.tokens) % 4:
        raise ProtocolError("packed tokens are cut")
    return message


def decode_intake(payload: bytes) -> IntakeMessage:
    """One message of intake.

    Raises:
        ProtocolError: not a message that this version reads.
    """
    message: IntakeMessage = _intake.decode(payload)
    return message


@dataclass(slots=True)
class Batch:
    """One read: messages in stream order."""

    log: list[LogMessage] = field(default_factory=list)
    intake: list[IntakeMessage] = field(default_factory=list)
    num_log_entries: int = 0
    """Unreadable ones included."""
    num_log_bytes: int = 0


class Inbox:
    """Reads both streams from given positions on. Entries that are no messages are counted and kept aside.

    A read can be sent before its answer is needed: so it goes with the leader's commit, in one piece.
    """

    def __init__(self, channel: Channel, client: redis.Redis, keys: Keys, *, log_id: str, intake_id: str) -> None:
        self._channel = channel
        self._client = client
        self._keys = keys
        self.log_id = log_id
        """Last entry of the step log that was read."""
        self.intake_id = intake_id
        """Last entry of intake that was read."""
        self.num_poisoned = 0

    @property
    def is_asked(self) -> bool:
        """Whether a `question` is on its way, so that `read` waits for as long as that says."""
        return self._channel.is_awaited

    def read(self, block_s: float) -> Batch:
        """All that is new, up to a page per stream; waits up to `block_s` seconds (0: not at all) for something.

        If `question` was sent before, it is its answer, which Redis gives when the first news come.

        Raises:
            RedisFailure: Redis did not answer.
        """
        if not self.is_asked:
            self._channel.send_all([self.question(block_s)])
        news = raw_entries(self._channel.receive())
        steps, intake = self._keys.steps, self._keys.intake
        batch = Batch()
        if steps in news:
            self._take_log(batch, news[steps])
        if intake in news:
            self._take_intake(batch, news[intake])
        return batch

    def question(self, block_s: float) -> Command:
        """The command that the next `read` would send."""
        block_ms = max(int(block_s * 1000), 1) if block_s > 0 else None
        return xread({self._keys.steps: self.log_id, self._keys.intake: self.intake_id}, block_ms=block_ms, count=PAGE)

    def _take_log(self, batch: Batch, entries: Sequence[Entry]) -> None:
        batch.num_log_entries = len(entries)
        for entry in entries:
            batch.num_log_bytes += len(entry.payload)
            try:
                batch.log.append(decode_log(entry.payload))
            except ProtocolError as error:
                self._keep_aside(self._keys.steps, entry, error)
        self.log_id = entries[-1].entry_id

    def _take_intake(self, batch: Batch, entries: Sequence[Entry]) -> None:
        for entry in entries:
            try:
                batch.intake.append(decode_intake(entry.payload))
            except ProtocolError as error:
                self._keep_aside(self._keys.intake, entry, error)
        self.intake_id = entries[-1].entry_id

    def _keep_aside(self, stream: str, entry: Entry, error: ProtocolError) -> None:
        """Best effort: what cannot be kept is at least counted and logged."""
        self.num_poisoned += 1
        logs.warning("message_unreadable", stream=stream, entry_id=entry.entry_id, error=type(error).__name__)
        try:
            fields = {"id": entry.entry_id, "m": entry.payload}
            with self._client.pipeline(transaction=False) as pipe:
                pipe.xadd(f"{stream}:dead", fields, maxlen=DEAD_LETTERS)  # type: ignore[arg-type]
                pipe.expire(f"{stream}:dead", LIVE_TTL_S)  # it may hold text
                pipe.execute()
        except RedisFailure:
            pass
