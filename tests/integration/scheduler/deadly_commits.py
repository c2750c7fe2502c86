"""A leader that dies around a commit: before it, between the commits of a turn, or after it, with the reply lost."""

import random
from typing import Any

from shared.scripts import AppendStatus, commit_ticks


class Killed(Exception):
    """The process dies here."""


class DeadlyCommits:
    """Stands in for `commit_ticks`; one death for each `arm`."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._channel: Any = None
        self._left = 0

    def arm(self, channel: Any = None) -> None:
        """Some commits from now whoever commits dies, or only who has `channel`."""
        self._channel, self._left = channel, self._chance.randint(3, 25)

    def __call__(self, channel: Any, keys: Any, commits: Any, then: Any) -> list[AppendStatus]:
        is_counted = self._left > 0 and self._channel in (None, channel)
        self._left -= is_counted
        if not is_counted or self._left:
            return commit_ticks(channel, keys, commits, then)
        landed = self._chance.randint(0, len(commits))
        if landed:
            commit_ticks(channel, keys, commits[:landed])
        raise Killed
