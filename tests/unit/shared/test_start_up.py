"""What start-up made is out of the collector's sight."""

import subprocess
import sys

PROGRAM = """
import gc
from shared.start_up import freeze_objects
made = [[n] for n in range(1000)]
count = freeze_objects()
assert count > 1000 and not any(item is made[0] for item in gc.get_objects())
"""


def test_frozen_objects_are_collected_no_more() -> None:
    """In a process of its own: this one is none that serves."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
