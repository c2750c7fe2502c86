"""Trimming: nothing that a reader may still need is cut.

step log      behind the last fold and snapshot, and only what is both older than a minute and more than 64 MB ago, or
              as old as the record of an ended request may be
intake        behind the last snapshot
plan streams  behind the last snapshot, as far as they are answered; those of ended incarnations are deleted, and with
              them what was saved of their caches
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import redis

from shared.keys import Keys
from shared.records import LIVE_TTL_S
from shared.streams import START, entry_order

MARK_INTERVAL_MS = 500
MARKS_PER_KEPT_LOG = 1000
"""Resolution of the step log: marks are that far apart in time, and that share of `keep_bytes`."""


class Incarnation(NamedTuple):
    """One plan stream."""

    worker: str
    number: int


class Saved(NamedTuple):
    """What the last committed snapshot covers."""

    log_id: str
    intake_id: str
    answered: Mapping[Incarnation, int]
    """Last answered plan of every live incarnation."""
    ended: tuple[Incarnation, ...]
    """Incarnations whose plan streams nobody needs any more."""
    cached: tuple[Incarnation, ...] = ()
    """Those whose cached blocks belong to it: all live ones."""


KEEP_USAGE_S = 7 * 86_400.0
MOST_S = 3600.0
"""The step log holds tokens, which are text: older ones go even if there are few."""


class Trimmer:
    """Knows what may go. `run` does it, in one pipeline; approximately, because whole nodes are cheap to cut."""

    def __init__(
        self,
        keys: Keys,
        *,
        keep_s: float,
        keep_bytes: int,
        keep_usage_s: float = KEEP_USAGE_S,
        most_s: float = MOST_S,
    ) -> None:
        self._keys = keys
        self._keep_ms = int(keep_s * 1000)
        self._keep_bytes = keep_bytes
        self._keep_usage_ms = int(keep_usage_s * 1000)
        self._most_ms = int(max(keep_s, most_s) * 1000)
        self._marks: deque[tuple[str, int]] = deque()
        """(entry id, payload bytes read up to and including it)."""
        self._num_bytes = 0
        self._aged = START
        """The newest entry known to be old enough."""
        self._saved: Saved | None = None
        self._folded = START
        self._ended: dict[Incarnation, None] = {}

    def on_read(self, log_id: str, num_bytes: int) -> None:
        """The step log was read up to `log_id`, `num_bytes` more than before."""
        self._num_bytes += num_bytes
        if not self._marks or self._is_far_from(*self._marks[-1], log_id):
            self._marks.append((log_id, self._num_bytes))

    def on_saved(self, saved: Saved) -> None:
        """A snapshot was committed."""
        self._saved = saved
        self._ended.update(dict.fromkeys(saved.ended))

    def on_folded(self, log_id: str) -> None:
        """Every live record holds its output up to `log_id`."""
        self._folded = log_id

    def run(self, client: redis.Redis, now: float = 0.0) -> None:
        """Cut what may go. `now`: Unix time, seconds; with it also what is old, however little there is, and what holds
        tokens lives no longer than a day without a leader.

        Raises:
            RedisFailure: Redis did not answer; nothing is lost by that.
        """
        saved = self._saved
        if saved is None:
            return
        with client.pipeline(transaction=False) as pipe:
            self._trim_log(pipe, saved, now)
            if saved.intake_id != START:
                pipe.xtrim(self._keys.intake, minid=saved.intake_id, approximate=True)
            used_until = self._usage_cut(saved, now)
            if used_until > 0:
                pipe.xtrim(self._keys.usage, minid=f"{used_until}-0", approximate=True)
            for (worker, number), answered in saved.answered.items():
                # Exactly: a plan holds the prompts of the rows that it adds.
                pipe.xtrim(self._keys.plans(worker, number), minid=f"{answered + 1}-0", approximate=False)
            if now:
                lanes = dict.fromkeys((*saved.answered, *saved.cached))  # the first plan may be unanswered yet
                plans = (self._keys.plans(worker, number) for worker, number in lanes)
                blocks = (self._keys.cached_blocks(worker, number) for worker, number in saved.cached)
                for name in (self._keys.steps, self._keys.intake, self._keys.snapshot, *plans, *blocks):
                    pipe.expire(name, LIVE_TTL_S)
            ended = list(self._ended)
            if ended:
                pipe.unlink(*(self._keys.plans(worker, number) for worker, number in ended))
                pipe.unlink(*(self._keys.cached_blocks(worker, number) for worker, number in ended))
            pipe.execute()
        for incarnation in ended:
            del self._ended[incarnation]

    def _usage_cut(self, saved: Saved, now: float) -> int:
        """Usage records of before this time (Unix, ms) may go; entry ids hold the time. In a pool at rest the log
        stands still while they age."""
        saved_until = entry_order(saved.log_id)[0]
        if not now:
            return saved_until - self._keep_usage_ms
        return min(saved_until, int(now * 1000) - self._keep_usage_ms)

    def _trim_log(self, pipe: redis.client.Pipeline, saved: Saved, now: float) -> None:
        cut = self._log_cut(saved)
        too_old = self._bound(f"{max(0, int(now * 1000) - self._most_ms)}-0", saved)
        if entry_order(too_old) > entry_order(cut):
            pipe.xtrim(self._keys.steps, minid=too_old, approximate=False)
        elif cut != START:
            pipe.xtrim(self._keys.steps, minid=cut, approximate=True)

    def _log_cut(self, saved: Saved) -> str:
        """The oldest entry of the step log to keep."""
        while self._marks and self._is_old(self._marks[0]):
            self._aged = self._marks.popleft()[0]
        return self._bound(self._aged, saved)

    def _bound(self, entry_id: str, saved: Saved) -> str:
        """No further than what a restart and records need."""
        return min(entry_id, saved.log_id, self._folded, key=entry_order)

    def _is_far_from(self, mark_id: str, mark_bytes: int, log_id: str) -> bool:
        grown = self._num_bytes - mark_bytes >= self._keep_bytes // MARKS_PER_KEPT_LOG
        return grown and entry_order(log_id)[0] >= entry_order(mark_id)[0] + MARK_INTERVAL_MS

    def _is_old(self, mark: tuple[str, int]) -> bool:
        log_id, num_bytes = mark
        newest = entry_order(self._marks[-1][0])[0]
        return newest - entry_order(log_id)[0] >= self._keep_ms and self._num_bytes - num_bytes >= self._keep_bytes
