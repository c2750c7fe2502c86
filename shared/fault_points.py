"""Named places in the services at which the fault tests end or pause a process: `PAGEWIRE_FAULT_DIR`.

A service that was started with that folder looks there whenever it passes a point. A file of the point's name holds the
name of a signal; the first process that gets hold of it (it is renamed to `<point>.<pid>`) sends itself that signal:
`SIGKILL` ends it right there, `SIGSTOP` pauses it until somebody sends SIGCONT. If the id of a request follows the
name, the file stays, and strikes every process that passes the point with that request. Without the folder a point is
one comparison with None.
"""

import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import StrEnum
from pathlib import Path


class FaultPoint(StrEnum):
    """The places."""

    REQUEST_SUBMITTED = "request_submitted"
    """Gateway: a request was appended to intake, its reply is not used yet."""
    STEP_BEGUN = "step_begun"
    """Worker: a plan is about to be computed; with the requests of the batch."""
    STEP_COMPUTED = "step_computed"
    """Worker: a result is about to be appended."""
    STEP_PUBLISHED = "step_published"
    """Worker: a result was appended, its reply is not used yet."""
    BLOCKS_COPIED = "blocks_copied"
    """Worker: a plan's block copies ran, its forward pass has not."""
    TICK_DECIDED = "tick_decided"
    """Leader: a turn's ticks are about to be committed."""
    TICK_COMMITTED = "tick_committed"
    """Leader: they were, and their replies are not used yet."""
    WORKER_FENCED = "worker_fenced"
    """Leader: the fence moved, the requests of the old incarnation are not requeued yet."""
    EPOCH_ACQUIRED = "epoch_acquired"
    """New leader: nobody else can commit any more, nothing is restored yet."""
    TICKS_REPLAYED = "ticks_replayed"
    """New leader: the state is restored, nothing is committed yet."""


_folder: Path | None = None


def arm(folder: str) -> None:
    """Look for faults in `folder` from now on; empty: nowhere. Called once, by a service's `__main__`."""
    global _folder
    _folder = Path(folder) if folder else None


def pass_point(point: FaultPoint, requests: Callable[[], Collection[str]] = tuple) -> None:
    """Suffer the fault that waits at `point`, if there is one. `requests`: those that it would be suffered with."""
    if _folder is None:
        return
    with suppress(FileNotFoundError):
        name, _, request_id = (_folder / point).read_text().strip().partition(" ")
        if not request_id:
            (_folder / point).rename(_folder / f"{point}.{os.getpid()}")
        elif request_id not in requests():
            return
        # To this thread: one that any thread of a busy process may take comes too late, when the point is passed.
        signal.raise_signal(signal.Signals[name])
