"""What every message is: a struct with a tag, and its wire form."""

from typing import Any, Generic, TypeVar

import msgspec

from shared.errors import MalformedMessage, UnsupportedSchema

SCHEMA_VERSION = 1
FIELD = b"m"
"""The one field of every stream entry."""


def tag(name: str) -> str:
    """Name and major schema version."""
    return f"{name}/{SCHEMA_VERSION}"


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A top-level message; its tag carries the schema version."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a message, without a version of its own."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | Part) -> bytes:
    """The wire form of one message."""
    return _encoder.encode(message)


M = TypeVar("M", bound=Message)


class Decoder(Generic[M]):
    """Decodes one union of messages, e.g. `Decoder(IntakeMessage)`."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes) -> M:
        """One message from its wire form.

        Raises:
            UnsupportedSchema: another major version.
            MalformedMessage: anything else that is not a message of the union.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
            version = _foreign_version(data)
            if version is not None:
                raise UnsupportedSchema(version) from error
            raise MalformedMessage(str(error)) from error


def _foreign_version(data: bytes) -> int | None:
    """The version of a message that this code cannot read, if it is a message of another major version."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not (isinstance(fields, list) and fields and isinstance(fields[0], str)):
        return None
    version = fields[0].rpartition("/")[2]
    return int(version) if version.isdecimal() and int(version) != SCHEMA_VERSION else None
