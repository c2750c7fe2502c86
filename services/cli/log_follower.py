"""Copies what children write to their log files to one stream, with the child's name before each line."""

import threading
from pathlib import Path
from typing import TextIO

INTERVAL_S = 0.2


class LogFollower:
    """Follows all `*.log` files of a folder from their present ends."""

    def __init__(self, folder: Path, out: TextIO) -> None:
        self._folder = folder
        self._out = out
        self._positions = {path: path.stat().st_size for path in folder.glob("*.log")}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> "LogFollower":
        self._thread.start()
        return self

    def stop(self) -> None:
        """Copy what is left and end."""
        self._stopped.set()
        self._thread.join()
        self._copy_all()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._copy_all()

    def _copy_all(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            self._copy(path)

    def _copy(self, path: Path) -> None:
        """Copy the complete lines that were appended; a file that shrank was rotated and starts anew."""
        start = self._positions.get(path, 0)
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(start if start <= size else 0)
            position = file.tell()
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._positions[path] = position + len(complete)
        for line in complete.decode(errors="replace").splitlines():
            print(f"{path.stem} | {line}", file=self._out)
