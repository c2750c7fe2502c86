"""Streams over requests that were submitted before. `submit` does not see them, so they are counted here.

By gateway: a caller with several of them may have as many streams at each.
"""

from collections import Counter

from shared.errors import RateLimited
from shared.scripts.quotas import Quota


class OpenStreams:
    """How many each caller with a limit has open."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def enter(self, quota: Quota | None) -> None:
        """Take a place, which `leave` gives back.

        Raises:
            RateLimited: the caller has as many as it may have requests at a time.
        """
        if quota is None or not quota.max_concurrent:
            return
        if self._open[quota.name] >= quota.max_concurrent:
            raise RateLimited("this key's limit of streams at a time is reached")
        self._open[quota.name] += 1

    def leave(self, quota: Quota | None) -> None:
        if quota is not None and quota.max_concurrent:
            self._open[quota.name] -= 1
            if not self._open[quota.name]:
                del self._open[quota.name]
