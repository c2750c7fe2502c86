"""A benchmark that is told to end takes the servers with it that it started."""

import signal
import sys
from types import FrameType


def exit_on_sigterm() -> None:
    """SIGTERM ends the program like an error: what `with` blocks hold is ended too. By default it would be orphaned."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
