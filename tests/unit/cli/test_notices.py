"""The supervisor outlives whoever reads its notices."""

import io
import sys

import pytest

from services.cli.up import Stack


class Gone(io.StringIO):
    """A pipe without a reader."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_lost_terminal_does_not_end_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pagewire up 2>&1 | tee log`: when tee had died, the next restart of a worker took the whole stack down."""
    monkeypatch.setattr(sys, "stderr", Gone())
    stack = Stack.__new__(Stack)
    stack._screen = None
    for _ in range(2):
        stack._notice("worker-0 died; starting it again")
