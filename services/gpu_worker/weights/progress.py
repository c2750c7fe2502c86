"""What a pull reports while it works."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` in a stage; `total` is 0 if it is unknown."""

    stage: str
    """`wait` (another pull holds the lock), `download` (bytes), `convert` (steps) or `ready`."""
    done: int
    total: int
    detail: str = ""


Report = Callable[[Progress], None]


def print_json_line(progress: Progress) -> None:
    """Write `progress` to stdout as one JSON line, at once."""
    sys.stdout.write(json.dumps(asdict(progress)) + "\n")
    sys.stdout.flush()
