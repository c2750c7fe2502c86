"""`pagewire replay`: a recording in, its verdict or an explanation out."""

import sys
from pathlib import Path

from services.scheduler.recording.reader import open_recording
from services.scheduler.recording.verify import verify


def run(folder: Path) -> int:
    """Derive every plan again, print what was found; the exit code.

    Raises:
        RecordingError: the recording is damaged, or of another version.
    """
    verdict = verify(open_recording(folder))
    for first, last in verdict.gaps:
        print(f"gap: ticks {first} to {last} are not recorded", file=sys.stderr)
    if verdict.lost_from:
        print(f"gap: ticks from {verdict.lost_from} on are not recorded", file=sys.stderr)
    for name in verdict.cut:
        print(f"{name} ends within a message, as if its process was killed", file=sys.stderr)
    print(verdict)
    return 0 if verdict.difference is None else 1
