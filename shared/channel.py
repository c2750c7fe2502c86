"""One connection for the commands that every step costs: a command without what a client does around it.

A client borrows a connection, polls it, and passes each command through its hooks for retries and metrics. Here it is
packed, sent and its reply parsed (by hiredis), no more; `make bench-scheduler` measures the turn. Address, TLS,
credentials, time-outs and the exceptions stay the client's, because the connection is one that it makes.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import redis
from hiredis import pack_command
from redis.exceptions import ResponseError

Command: TypeAlias = tuple[bytes | str | float, ...] | bytes
"""Its words, or all of them packed."""

FRESH_S = 1.0
"""A connection that was idle for longer is looked at before it is used: the server may have closed it."""


def pack(*command: bytes | str | float) -> bytes:
    """A command as it is sent."""
    # hiredis declares a tuple of one argument, but packs any number.
    packed: bytes = pack_command(command)  # type: ignore[arg-type]
    return packed


class Words(NamedTuple):
    """Words of a command as they are sent, to be put together with others."""

    num_words: int
    data: bytes


MANY_WORDS = 1000
"""More at a time cost hiredis several times as much for each."""


def pack_words(words: Sequence[bytes | str | float]) -> Words:
    """Pack words that follow or precede others of their command."""
    return Words(
        len(words), b"".join([_pack_words(words[at : at + MANY_WORDS]) for at in range(0, len(words), MANY_WORDS)])
    )


def _pack_words(words: Sequence[bytes | str | float]) -> bytes:
    packed = pack(*words)
    return packed[packed.index(b"\n") + 1 :]


def join_words(*parts: Words) -> bytes:
    """The packed command of these words."""
    return b"".join([b"*%d\r\n" % sum([part.num_words for part in parts]), *[part.data for part in parts]])


class Channel:
    """A connection of its own, made when it is first needed, for one thread.

    Unless every reply was read, the connection is closed before it is used again: an unread reply would answer the next
    command. Then it connects anew; what may be repeated is for callers to know.
    """

    def __init__(self, client: redis.Redis) -> None:
        """Connects as `client` does."""
        self._connection: Any = client.connection_pool.make_connection()
        self._is_open = False
        self._used_at = 0.0
        self._num_unread = 0

    def execute(self, *command: bytes | str | float) -> Any:
        """The raw reply: bytes, integers, lists of them, None.

        Raises:
            ResponseError: Redis refused the command.
            RedisFailure: the outcome is unknown.
        """
        self.send_all((command,))
        return self.receive()

    def execute_all(self, commands: Sequence[Command]) -> list[Any]:
        """The raw replies to commands that are sent together; a command that Redis refused has a `ResponseError`.

        Raises:
            RedisFailure: the outcome is unknown, of all of them.
        """
        self.send_all(commands)
        return self.receive_all(len(commands))

    # ------------------------------------------------------------ a command now, its reply later

    @property
    def is_awaited(self) -> bool:
        """Whether replies to `send_all` are to come."""
        return self._num_unread > 0

    def send_all(self, commands: Sequence[Command]) -> None:
        """Send commands together; `receive` takes their replies. Those of earlier ones are given up.

        Raises:
            RedisFailure: there will be no reply.
        """
        if self._num_unread:
            self.close()
        self._freshen()
        try:
            packed = b"".join([c if isinstance(c, bytes) else pack(*c) for c in commands])
            self._connection.send_packed_command([packed], check_health=False)
        except BaseException:
            self.close()
            raise
        self._is_open, self._num_unread = True, len(commands)

    def receive_all(self, count: int) -> list[Any]:
        """The next `count` replies, as `execute_all` answers them.

        Raises:
            RedisFailure: the outcome is unknown, of all of them.
        """
        return [self._receive() for _ in range(count)]

    def receive(self) -> Any:
        """The next raw reply.

        Raises:
            ResponseError: Redis refused the command.
            RedisFailure: the outcome is unknown.
        """
        reply = self._receive()
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    # ------------------------------------------------------------ the connection

    def close(self) -> None:
        """Close the connection; another call would open it again."""
        self._is_open, self._num_unread = False, 0
        self._connection.disconnect()

    def _receive(self) -> Any:
        try:
            reply = self._reply()
        except BaseException:
            self.close()
            raise
        self._num_unread -= 1
        return reply

    def _reply(self) -> Any:
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error

    def _freshen(self) -> None:
        """Give a connection up that the server has closed meanwhile, as far as can be seen."""
        now = time.monotonic()
        if self._is_open and now - self._used_at > FRESH_S:
            try:
                is_sound = not self._connection.can_read()
            except redis.RedisError:
                is_sound = False
            if not is_sound:
                self.close()
        self._used_at = now
