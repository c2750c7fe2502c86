"""Free ports, chosen at run time."""

import random
import socket

_RANGE = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections: none of these takes a port while its server starts, or starts
again."""


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now. Drawn, so that two who ask at a time seldom get the same."""
    draws = random.SystemRandom()
    while True:
        port = draws.choice(_RANGE)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
