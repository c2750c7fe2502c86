"""Standard output that takes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", [["ps", "--json"], ["simulate", "--requests", "3"]])
def test_a_full_disk_is_one_line(command: list[str], tmp_path: Path) -> None:
    """What was printed may meet the disk only when the process ends: Python then showed a traceback, or complained."""
    with open("/dev/full", "w") as full:
        done = _pagewire(*command, stdout=full, state=tmp_path)
        assert (done.wait(60), done.communicate()[1]) == (1, "error: cannot write: No space left on device\n")


def test_a_reader_that_is_gone_is_no_error(tmp_path: Path) -> None:
    done = _pagewire("ps", "--json", stdout=subprocess.PIPE, state=tmp_path)
    assert done.stdout is not None and done.stderr is not None
    done.stdout.close()
    assert (done.wait(60), done.stderr.read()) == (1, "")
    done.stderr.close()


def _pagewire(*arguments: str, stdout: object, state: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", *arguments],
        stdout=stdout,  # type: ignore[call-overload]
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PAGEWIRE_STATE": str(state)},
    )
