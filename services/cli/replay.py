"""`pagewire replay`: a recording in, its verdict or an explanation out."""

import sys
from pathlib import Path

from services.scheduler.recording.life import explain_request
from services.scheduler.recording.reader import open_recording
from services.scheduler.recording.step import explain_step
from services.scheduler.recording.verify import verify


def run(folder: Path, *, step: str | None = None, request: str | None = None) -> int:
    """Explain a step or a request, or derive every plan again and print what was found; the exit code.

    Raises:
        ConfigError: `step` is no step.
        RecordingError: the recording is damaged, of another version, or has no such step or request.
    """
    files = open_recording(folder)
    for line in explain_step(files, step) if step else ():
        print(line)
    for line in explain_request(files, request) if request else ():
        print(line)
    if step or request:
        return 0
    verdict = verify(files)
    for first, last in verdict.gaps:
        print(f"gap: ticks {first} to {last} are not recorded", file=sys.stderr)
    if verdict.lost_from:
        print(f"gap: ticks from {verdict.lost_from} on are not recorded", file=sys.stderr)
    if not (verdict.lost_from or verdict.is_closed or verdict.difference):
        reasons = "its process still runs or was killed, or the disk was full"
        print(f"gap: the recording was not closed after tick {verdict.last_tick}: {reasons}", file=sys.stderr)
    for name in verdict.cut:
        print(f"{name} ends within a message, as if its process was killed or the disk was full", file=sys.stderr)
    print(verdict)
    return 0 if verdict.difference is None else 1
