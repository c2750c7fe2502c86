"""The leader's hook for a recording. What it is handed is immutable, so a thread of its own encodes and writes it.

    on_tick ──▶ pending ──on_commit──▶ queue ──▶ thread: encode, write
                   └──discard──▶ ∅  (another leader: never committed)

A leader that is killed may leave ticks unwritten. Its successor replays those after the snapshot, and records them; so
the thread is woken for every snapshot, and what can be missing is a tick or two right before it, which is a gap too.

The leader waits for nothing. If the thread falls behind too far, or the disk refuses, ticks are lost: the next file
says that there is a gap, and begins with the whole state again.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import take_snapshot
from services.scheduler.core.ticks import TickOutcome
from services.scheduler.recording.format import SUFFIX, End, Header, Loss, TickRecord, config_dict, ended_of, plan_bytes
from services.scheduler.service import logs
from shared.errors import ConfigError
from shared.messages import IntakeMessage, LogMessage, Submission, Submit, Tick, encode

WRITE_INTERVAL_S = 0.1
MAX_BACKLOG = 20_000
"""Ticks that wait to be written; with more the rest is lost, up to the next file."""
RETRY_S = 5.0
"""After the disk refused."""


@dataclass(frozen=True, slots=True)
class RecorderLimits:
    """Sizes in bytes."""

    file: int = 64 * 1024 * 1024
    """A file that is larger is followed by the next."""
    folder: int = 4 * 1024 * 1024 * 1024
    """The oldest files go while all are larger together."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """One tick as the leader handed it over."""

    tick: Tick
    log: Sequence[LogMessage]
    intake: Sequence[IntakeMessage]
    submissions: Mapping[str, Submission]
    outcome: TickOutcome

    def encoded(self) -> bytes:
        planned = self.outcome.plan
        return encode(
            TickRecord(
                tick=self.tick,
                log=tuple(self.log),
                intake=tuple(self.intake),
                submissions=tuple(self._submissions()),
                worker=planned.worker if planned else "",
                incarnation=planned.incarnation if planned else 0,
                plan=msgspec.Raw(plan_bytes(self.outcome)),
                events=self.outcome.events,
                cached=self.outcome.cached,
                ended=tuple(ended_of(finished) for finished in self.outcome.finished),
            )
        )

    def _submissions(self) -> Iterator[Submission]:
        """Those that the intake points to; a leader that takes over has more at hand."""
        for message in self.intake:
            if isinstance(message, Submit) and message.request_id in self.submissions:
                yield self.submissions[message.request_id]


class Recorder:
    """Records one pool into `folder`, leader after leader of this process.

    Raises:
        ConfigError: the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: Path,
        pool: str,
        limits: RecorderLimits | None = None,
        *,
        wall: Callable[[], float] = time.time,
        interval_s: float = WRITE_INTERVAL_S,
    ) -> None:
        self.num_lost = 0
        """Ticks that were not recorded."""
        self._folder, self._pool, self._wall, self._interval_s = folder, pool, wall, interval_s
        self._limits = limits or RecorderLimits()
        self._epoch = 0
        self._pending: list[Header | _Seen | Loss] = []
        self._queue: deque[Header | _Seen | Loss] = deque()
        self._is_losing = False
        self._cause = ""
        """Why the thread wants a new file; only it sets this, only the leader clears it."""
        self._not_before = 0.0
        self._file: BinaryIO | None = None
        self._size = 0
        _check_folder(folder)
        self._wake = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called by the leader

    def begin(self, core: SchedulerCore, *, epoch: int, tick: int, now: float, cause: str) -> None:
        """A leader stands at `tick`; what follows is recorded from there."""
        self._epoch = epoch
        self._pending = [self._header(core, tick, now, cause)]
        self.on_commit()

    def on_tick(
        self,
        core: SchedulerCore,
        tick: Tick,
        log: Sequence[LogMessage],
        intake: Sequence[IntakeMessage],
        submissions: Mapping[str, Submission],
        outcome: TickOutcome,
    ) -> None:
        """A tick was applied to `core`. Nothing that is handed over may change any more."""
        if self._is_losing:
            self._lose_or_recover(core, tick)
            return
        if len(self._queue) > MAX_BACKLOG:
            self._is_losing = True
            self.num_lost += 1
            self._pending.append(Loss(tick.number, "backlog"))
            logs.warning("recording_gap", first_tick=tick.number, reason="backlog")
            return
        self._pending.append(_Seen(tick, log, intake, submissions, outcome))
        if self._cause and tick.now >= self._not_before:
            cause, self._cause = self._cause, ""
            self._pending.append(self._header(core, tick.number, tick.now, cause))

    def on_commit(self, *, hurry: bool = False) -> None:
        """All ticks so far are committed. `hurry` if a snapshot is among them: a successor records from there on."""
        if self._pending:
            self._queue.extend(self._pending)
            self._pending.clear()
        if hurry:
            self._wake.set()

    def discard(self) -> None:
        """The ticks since the last commit will never be committed."""
        self._pending.clear()

    def _lose_or_recover(self, core: SchedulerCore, tick: Tick) -> None:
        self.num_lost += 1
        if len(self._queue) < MAX_BACKLOG // 2:
            self._pending.append(self._header(core, tick.number, tick.now, "gap"))
            self._is_losing = False

    def _header(self, core: SchedulerCore, tick: int, now: float, cause: str) -> Header:
        snapshot = take_snapshot(core)
        submissions = tuple(request.submission for request in core.requests.values())
        return Header(self._pool, self._epoch, cause, tick, now, config_dict(core.config), snapshot, submissions)

    def close(self) -> None:
        """Write what is committed, and end."""
        self._is_over = True
        self._wake.set()
        self._thread.join()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            self._write()
        self._write()
        self._append([encode(End())])
        self._close_file()

    def _write(self) -> None:
        """Everything in the queue, a file at a time."""
        batch: list[bytes] = []
        while self._queue:
            item = self._queue.popleft()
            if isinstance(item, Header):
                self._append(batch)
                batch = []
                self._open(item)
            elif self._file is not None:
                batch.append(encode(item) if isinstance(item, Loss) else item.encoded())
            elif isinstance(item, _Seen):
                self.num_lost += 1
        self._append(batch)
        if self._size > self._limits.file and not self._cause:
            self._cause, self._size = "rotation", 0

    def _open(self, header: Header) -> None:
        self._close_file()
        name = f"{int(self._wall() * 1000):015d}-{header.epoch:06d}-{header.tick:012d}{SUFFIX}"
        try:
            descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._file, self._size = os.fdopen(descriptor, "wb", buffering=0), 0
        except OSError as error:
            self._fail(error)
            return
        if not self._append([encode(header)]):
            (self._folder / name).unlink(missing_ok=True)  # half a header says nothing
        self._forget_oldest()

    def _append(self, batch: list[bytes]) -> bool:
        """Write; whether the disk took it."""
        if self._file is None or not batch:
            return True
        data = memoryview(b"".join(batch))
        self._size += len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        """No file until the leader begins one again, after a while."""
        logs.warning("recording_gap", reason=error.strerror)
        self._close_file()
        self._not_before = self._wall() + RETRY_S
        self._cause = "gap"

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _forget_oldest(self) -> None:
        files = sorted(self._folder.glob(f"*{SUFFIX}"))
        sizes = [file.stat().st_size for file in files]
        excess = sum(sizes) - self._limits.folder
        for file, size in zip(files[:-1], sizes, strict=False):
            if excess <= 0:
                return
            logs.info("recording_trimmed", file=file.name)
            file.unlink(missing_ok=True)
            excess -= size


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"recordings cannot be written to {folder}: {error.strerror}") from error
