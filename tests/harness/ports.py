"""Free ports, chosen at run time."""

import socket


def free_port() -> int:
    """A TCP port on loopback that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
