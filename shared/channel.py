"""One connection for the commands that every step costs: a command without what a client does around it.

A client borrows a connection, polls it, and passes each command through its hooks for retries and metrics. Here it is
packed, sent and its reply parsed (by hiredis), no more; `make bench-scheduler` measures the turn. Address, TLS,
credentials, time-outs and the exceptions stay the client's, because the connection is one that it makes.
"""

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import redis
from hiredis import pack_command
from redis.exceptions import ResponseError

Command: TypeAlias = tuple[bytes | str | float, ...]

FRESH_S = 1.0
"""A connection that was idle for longer is looked at before it is used: the server may have closed it."""


class Channel:
    """A connection of its own, made when it is first needed, for one thread.

    Unless every reply was read, the connection is closed: an unread reply would answer the next command. The call
    after that connects anew; what may be repeated is for callers to know.
    """

    def __init__(self, client: redis.Redis) -> None:
        """Connects as `client` does."""
        self._connection: Any = client.connection_pool.make_connection()
        self._is_open = False
        self._used_at = 0.0

    def execute(self, *command: bytes | str | float) -> Any:
        """The raw reply: bytes, integers, lists of them, None.

        Raises:
            ResponseError: Redis refused the command.
            RedisFailure: the outcome is unknown.
        """
        (reply,) = self.execute_all((command,))
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def execute_all(self, commands: Sequence[Command]) -> list[Any]:
        """The raw replies to commands that are sent together; a command that Redis refused has a `ResponseError`.

        Raises:
            RedisFailure: the outcome is unknown, of all of them.
        """
        self._freshen()
        connection = self._connection
        try:
            # hiredis declares a tuple of one argument, but packs any number.
            packed = b"".join(pack_command(command) for command in commands)  # type: ignore[arg-type]
            connection.send_packed_command([packed], check_health=False)
            replies = [self._reply() for _ in commands]
        except BaseException:
            self.close()
            raise
        self._is_open = True
        return replies

    def close(self) -> None:
        """Close the connection; another call would open it again."""
        self._is_open = False
        self._connection.disconnect()

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
