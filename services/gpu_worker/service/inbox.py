"""What reaches the compute thread of one incarnation: plans in order, or the news that there will be no more."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from shared.messages import StepPlan


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """A plan and the bytes it came as."""

    plan: StepPlan
    payload: bytes


class Inbox:
    """Filled by the reader; closed by whoever learns first that the incarnation is over."""

    def __init__(self, on_fenced: Callable[[], None] = lambda: None) -> None:
        """`on_fenced` is called once, by the thread that learned it."""
        self._on_fenced = on_fenced
        self._lock = threading.Lock()
        self._entries: queue.SimpleQueue[PlanEntry | None] = queue.SimpleQueue()
        self._fenced = threading.Event()
        self._error: Exception | None = None

    def put(self, entry: PlanEntry) -> None:
        self._entries.put(entry)

    def close_fenced(self) -> None:
        """Somebody else owns the worker's number now: no queued plan counts any more."""
        with self._lock:
            is_news = not self._fenced.is_set()
            self._fenced.set()
        self._entries.put(None)
        if is_news:
            self._on_fenced()

    def fail(self, error: Exception) -> None:
        """Another lane cannot go on: `get` raises `error` once the plans before it are taken."""
        self._error = error
        self._entries.put(None)

    @property
    def is_fenced(self) -> bool:
        return self._fenced.is_set()

    @property
    def is_empty(self) -> bool:
        return self._entries.empty()

    def get(self, timeout_s: float) -> PlanEntry | None:
        """The next plan, or None if there is none within `timeout_s` or the incarnation was fenced."""
        try:
            entry = self._entries.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if entry is None and self._error is not None:
            raise self._error
        return None if self.is_fenced else entry
