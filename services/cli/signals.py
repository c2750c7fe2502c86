"""Signals as values: the supervisor's main thread waits for them instead of being interrupted by them."""

import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(Exception):
    """Ctrl-C, SIGTERM or a closed terminal: shut down in order."""


def _noop(signum: int, frame: FrameType | None) -> None:
    """A Python-level handler must exist for the wakeup descriptor to be written."""


class SignalInbox:
    """Collects SIGINT, SIGTERM, SIGHUP and SIGCHLD while open. Main thread only.

    `wait` returns as soon as one arrives, so that a child's death is seen at once and not at the next poll.
    """

    _HANDLED = (*STOP_SIGNALS, signal.SIGCHLD)

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._previous: dict[int, signal.Handlers | None] = {}
        self._previous_fd = -1

    def __enter__(self) -> Self:
        self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for signum in self._HANDLED:
            self._previous[signum] = signal.signal(signum, _noop)  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._previous_fd)
        self._receiver.close()
        self._sender.close()

    def wait(self, timeout_s: float) -> list[int]:
        """The stop signals that arrived, in order; returns early, maybe empty, when a child ends."""
        ready, _, _ = select.select([self._receiver], [], [], max(timeout_s, 0.0))
        if not ready:
            return []
        received = self._receiver.recv(4096)
        return [signum for signum in received if signum in STOP_SIGNALS]
