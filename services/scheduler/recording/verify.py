"""The recorded ticks through the same core: byte-identical, or the first difference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.scheduler.core.saved import UnusableSnapshot
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import restore
from services.scheduler.core.ticks import TickOutcome, apply_tick
from services.scheduler.recording.differences import Difference, compare
from services.scheduler.recording.format import NO_PLAN, Header, RecordingError, TickRecord, config_of
from services.scheduler.recording.reader import RecordedFile


@dataclass(frozen=True, slots=True)
class Step:
    """One tick as it was applied again."""

    file: RecordedFile
    core: SchedulerCore
    """After the tick."""
    record: TickRecord
    outcome: TickOutcome


@dataclass(slots=True)
class Verdict:
    """What a replay found. Ticks that are in two files count once."""

    num_ticks: int = 0
    num_plans: int = 0
    num_files: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """(first, last) ticks that are in no file."""
    lost_from: int = 0
    """The first of the ticks behind the last file that could not be recorded; 0: none."""
    cut: list[str] = field(default_factory=list)
    """Files that end within a message."""
    last_tick: int = 0
    is_closed: bool = False
    """Whether the last file says that nothing is missing behind it."""
    difference: Difference | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every tick from the first file's beginning to the recorder's end is there."""
        return self.is_closed and not self.gaps

    def __str__(self) -> str:
        if self.difference is not None:
            return str(self.difference)
        missing = "" if self.is_complete else ", as far as they are recorded: the recording is incomplete"
        return f"{self.num_ticks} ticks, {self.num_plans} plans: byte-identical{missing}"


def restore_core(header: Header, path: object) -> SchedulerCore:
    """The core with which a file begins.

    Raises:
        RecordingError: this version cannot.
    """
    submissions = {submission.request_id: submission for submission in header.submissions}
    try:
        return restore(header.snapshot, config_of(header), submissions)
    except UnusableSnapshot as error:
        raise RecordingError(f"{path}: {error}; replay it with the version that recorded it") from error


def replay_file(
    file: RecordedFile, before: Callable[[SchedulerCore, TickRecord], None] | None = None
) -> Iterator[Step]:
    """Apply a file's ticks one after the other; `before` looks at the core ahead of each.

    Raises:
        RecordingError: the file is damaged, or of another version.
    """
    core = restore_core(file.header, file.path)
    for record in file.ticks():
        if before is not None:
            before(core, record)
        submissions = {submission.request_id: submission for submission in record.submissions}
        try:
            outcome = apply_tick(core, record.tick, record.log, record.intake, submissions)
        except Exception as error:  # whatever a core does that was told something else
            raise RecordingError(f"{file.path}: tick {record.tick.number} cannot be applied: {error!r}") from error
        yield Step(file, core, record, outcome)


def verify(files: list[RecordedFile]) -> Verdict:
    """Replay every file up to the first difference.

    Raises:
        RecordingError: a file is damaged, or of another version.
    """
    verdict, last, last_now = Verdict(), -1, 0.0
    for file in files:
        header = file.header
        verdict.num_files += 1
        if last < 0 or (header.tick < last and header.now > last_now):
            last = header.tick  # the first file, or that of another run in the same folder
        if header.tick > last:
            verdict.gaps.append((last + 1, header.tick))
            last = header.tick
        for step in replay_file(file):
            number = step.record.tick.number
            verdict.difference = compare(step.record, step.outcome)
            if verdict.difference is not None:
                return verdict
            if number > last:
                verdict.num_ticks += 1
                verdict.num_plans += step.record.plan != NO_PLAN
                last, last_now = number, step.record.tick.now
        verdict.lost_from, verdict.is_closed, verdict.last_tick = file.lost_from, file.is_closed, last
        if file.is_cut:
            verdict.cut.append(file.path.name)
    return verdict
