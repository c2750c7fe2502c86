"""Files of a recording, to headers and ticks."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack
import msgspec

from services.scheduler.recording.format import SUFFIX, End, Header, Loss, RecordingError, TickRecord

_headers = msgspec.msgpack.Decoder(Header)
_records: msgspec.msgpack.Decoder[TickRecord | Loss | End] = msgspec.msgpack.Decoder(TickRecord | Loss | End)


class _Cut(Exception):
    """The end of the file is within a message."""


class _Damage(Exception):
    """Bytes that are no message."""


@dataclass(slots=True)
class RecordedFile:
    """One file: its header, and its ticks one by one."""

    path: Path
    header: Header
    is_cut: bool = False
    """After its ticks were read: it ends within a message, as that of a killed process may."""
    is_closed: bool = False
    """After its ticks were read: its recorder had written all that there was."""
    lost_from: int = 0
    """After its ticks were read: the first of those behind it that could not be recorded; 0: none."""

    def ticks(self) -> Iterator[TickRecord]:
        """In order.

        Raises:
            RecordingError: the file is damaged; names the tick.
        """
        number = self.header.tick
        messages = _messages(self.path)
        try:
            next(messages)
            for number, (offset, message) in enumerate(messages, self.header.tick + 1):
                record = self._record(number, offset, message)
                if isinstance(record, Loss):
                    self.lost_from = record.tick
                    return
                if isinstance(record, End):
                    self.is_closed = True
                    return
                yield record
        except _Cut:
            self.is_cut = True
        except _Damage as error:
            raise RecordingError(f"{self.path}: damaged behind tick {number}, {error}") from error

    def _record(self, number: int, offset: int, message: memoryview) -> TickRecord | Loss | End:
        try:
            record = _records.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordingError(f"{self.path}: tick {number} is damaged, byte {offset}: {error}") from error
        if isinstance(record, TickRecord) and record.tick.number != number:
            raise RecordingError(f"{self.path}: byte {offset} has tick {record.tick.number} instead of {number}")
        return record


def open_recording(folder: Path) -> list[RecordedFile]:
    """The files of a recording, in the order in which they were begun.

    Raises:
        RecordingError: there is none, or one begins with something else.
    """
    if not folder.is_dir():
        raise RecordingError(f"{folder} is no folder")
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    files = [found for path in paths if (found := _open(path)) is not None]
    if not files:
        raise RecordingError(f"{folder} holds no recording (*{SUFFIX})")
    return files


def _open(path: Path) -> RecordedFile | None:
    """None: the process died before the header was complete, so the file says nothing."""
    try:
        _, message = next(_messages(path))
        return RecordedFile(path, _headers.decode(message))
    except (_Cut, StopIteration):
        return None
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    except (_Damage, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} is no recording of this version: {error}") from error


def _messages(path: Path) -> Iterator[tuple[int, memoryview]]:
    """(offset, message) of every message. Raises _Cut where the end cuts one, _Damage where there is none."""
    data = path.read_bytes()
    unpacker = msgpack.Unpacker(io.BytesIO(data), max_buffer_size=len(data) + 1)
    start, view = 0, memoryview(data)
    while start < len(data):
        try:
            unpacker.skip()
        except msgpack.OutOfData:
            raise _Cut from None
        except (ValueError, msgpack.UnpackException) as error:
            raise _Damage(f"byte {start}: no MessagePack") from error
        end = unpacker.tell()
        yield start, view[start:end]
        start = end
