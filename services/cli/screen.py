"""What people see while something starts: bars on a terminal, else plain lines. On stderr; stdout is for results."""

import sys
from types import TracebackType
from typing import Protocol, Self, TextIO


class Screen(Protocol):
    """Shows notes and progress. `fraction` is 0 to 1, or None if the total is unknown."""

    def note(self, text: str) -> None: ...

    def progress(self, label: str, fraction: float | None, detail: str = "") -> None: ...

    def finish(self, label: str) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainScreen:
    """Lines for logs and pipes: one when something begins, one per quarter, one when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._quarters: dict[str, int] = {}

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def progress(self, label: str, fraction: float | None, detail: str = "") -> None:
        quarter = int((fraction or 0.0) * 4)
        if quarter <= self._quarters.get(label, -1):
            return
        self._quarters[label] = quarter
        share = "" if fraction is None else f" {quarter * 25} %"
        self.note(f"{label}{share}{' ' + detail if detail else ''}")

    def finish(self, label: str) -> None:
        if self._quarters.pop(label, 4) < 4:
            self.note(f"{label} done")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class RichScreen:
    """Progress bars that stay below the notes."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

        self._console = Console(file=stream)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def progress(self, label: str, fraction: float | None, detail: str = "") -> None:
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=None, detail=detail)
        total = None if fraction is None else 1.0
        self._bars.update(self._tasks[label], completed=fraction or 0.0, total=total, detail=detail)

    def finish(self, label: str) -> None:
        if label in self._tasks:
            self._bars.remove_task(self._tasks.pop(label))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def open_screen() -> Screen:
    """The screen that fits stderr."""
    return RichScreen(sys.stderr) if sys.stderr.isatty() else PlainScreen(sys.stderr)
