"""Making a model folder appear whole or not at all."""

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.gpu_worker.weights.progress import Progress, Report
from shared.model_store import missing_files

_LOCK_POLL_S = 0.2


@contextmanager
def exclusive(target: Path, report: Report) -> Iterator[None]:
    """Hold the lock of the model folder `target`; the kernel frees it if the process dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        waited = 0
        while not _try_lock(lock.fileno()):
            report(Progress("wait", waited, 0, "another process is making this model"))
            waited += 1
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A fresh folder beside `target` that replaces it if the block ends well and is removed if not.

    The caller holds `exclusive(target)`, so leftovers of interrupted pulls are nobody's and are removed first.
    """
    partial = target.parent / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        missing = missing_files(partial)
        if missing:
            raise OSError(f"the model folder lacks {', '.join(missing)}")
        _make_readable(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _make_readable(folder: Path) -> None:
    """A cache may be filled by one user and read by another, as in containers; some libraries write files as 0600."""
    for path in folder.iterdir():
        if path.is_symlink():  # to a file of the user's
            continue
        path.chmod(0o755 if path.is_dir() else 0o644)
