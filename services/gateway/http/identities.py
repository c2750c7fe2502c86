"""Ids that nobody can guess, without a system call for each: in a flood each call waits for the interpreter's lock."""

import os

ID_BYTES = 16
_IDS_AT_ONCE = 256


class Identities:
    """Draws of 128 random bits."""

    def __init__(self) -> None:
        self._bytes = b""

    def next(self) -> str:
        """32 hexadecimal digits."""
        if not self._bytes:
            self._bytes = os.urandom(ID_BYTES * _IDS_AT_ONCE)
        drawn, self._bytes = self._bytes[:ID_BYTES], self._bytes[ID_BYTES:]
        return drawn.hex()
