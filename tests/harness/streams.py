"""Many resuming clients whose texts are known: each takes one stream after another until it is told to end."""

import itertools
import random
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from services.cli.resuming import ResumingStream, ServerError

PATH = "/v1/completions"
FAILURE_PAUSE_S = 0.2
REFUSALS = ("ServerError: HTTP 503", "ServerError: HTTP 429")


@dataclass(frozen=True, slots=True)
class Reference:
    """A request, and what the pool answers to it when nothing happens."""

    body: dict[str, Any]
    text: str
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Outcome:
    """What one client got of one stream."""

    reference: Reference
    started_at: float
    """Monotonic, as all times here."""
    text: str = ""
    reasons: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    request_id: str = ""
    arrivals: list[float] = field(default_factory=list)
    """When a chunk with text came."""
    connects: list[float] = field(default_factory=list)
    """When a request for the stream or its rest was sent."""
    num_resumed: int = 0
    error: str = ""
    ended_at: float = 0.0

    def take(self, chunk: dict[str, Any]) -> None:
        """One more chunk."""
        texts = [choice["text"] for choice in chunk["choices"]]
        self.text += "".join(texts)
        self.reasons += [choice["finish_reason"] for choice in chunk["choices"] if choice["finish_reason"]]
        if any(texts):
            self.arrivals.append(time.monotonic())
        if chunk.get("usage"):
            self.usages.append(chunk["usage"])

    @property
    def was_refused(self) -> bool:
        """It was never accepted, and its client was told so: nothing was promised."""
        return not self.request_id and self.error.startswith(REFUSALS)

    def fault(self) -> str:
        """What is wrong with it; empty if it is exactly what it should be."""
        wanted = self.reference
        if self.error:
            return self.error
        if self.text != wanted.text:
            same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.text, wanted.text))))  # noqa: B905
            return f"another text from character {same} of {len(wanted.text)} on, {len(self.text)} in all"
        if self.reasons != ["length"]:
            return f"finish reasons {self.reasons}"
        counts = [usage["completion_tokens"] for usage in self.usages]
        return "" if counts == [len(wanted.tokens)] else f"usage {counts}"

    def recovery_s(self, fault_at: float, until: float) -> float | None:
        """The longest pause that ended in (fault_at, until], counted from `fault_at` at the earliest; None if the
        stream was not in flight then."""
        if not self.arrivals or self.arrivals[0] >= fault_at:
            return None
        pauses = [
            later - max(earlier, fault_at)
            for earlier, later in itertools.pairwise(self.arrivals)
            if fault_at < later <= until
        ]
        return max(pauses, default=None)

    def resumptions_s(self) -> list[float]:
        """From each taking-up to the first text after it. Attempts that failed are passed over; so is, as in
        `recovery_s`, a stream that had not begun: it waits for its prefill."""
        later = [*self.connects[1:], float("inf")]
        found = ((at, [a for a in self.arrivals if at < a < end]) for at, end in zip(self.connects, later, strict=True))
        return [arrivals[0] - at for at, arrivals in found if arrivals and self.arrivals[0] < at]


class _TimedStream(ResumingStream):
    """Notes when it connects."""

    def __init__(self, urls: Sequence[str], body: dict[str, Any], connects: list[float]) -> None:
        super().__init__(urls, PATH, body)
        self._connects = connects

    def _opened(self, client: httpx.Client) -> AbstractContextManager[httpx.Response]:
        self._connects.append(time.monotonic())
        return super()._opened(client)


class StreamLoad:
    """`count` clients, each streaming one request after another. A context manager: at its end all streams end."""

    def __init__(self, urls: Sequence[str], references: Sequence[Reference], count: int, *, seed: int) -> None:
        self._urls = list(urls)
        self._references = references
        self._order = random.Random(seed)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._live: dict[int, Outcome] = {}
        self.ended: list[Outcome] = []
        self._threads = [threading.Thread(target=self._client, args=(place,), daemon=True) for place in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.finish()

    @property
    def in_flight(self) -> list[Outcome]:
        """Streams that have begun to tell and have not ended."""
        with self._lock:
            return [outcome for outcome in self._live.values() if outcome.arrivals]

    def wait_in_flight(self, count: int, seconds: float = 120.0) -> int:
        """Until so many streams are in flight; how many are."""
        deadline = time.monotonic() + seconds
        while (flying := len(self.in_flight)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{flying} streams in flight after {seconds} s, not {count}")
            time.sleep(0.01)
        return flying

    def finish(self, seconds: float = 240.0) -> None:
        """No new streams; returns when the live ones have ended."""
        self._stop.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if hung := sum(thread.is_alive() for thread in self._threads):
            raise TimeoutError(f"{hung} streams without an end after {seconds:g} s")

    def _client(self, place: int) -> None:
        while not self._stop.is_set():
            with self._lock:
                outcome = Outcome(self._order.choice(self._references), time.monotonic())
                self._live[place] = outcome
            self._stream(outcome, place)
            outcome.ended_at = time.monotonic()
            with self._lock:
                del self._live[place]
                self.ended.append(outcome)
            if outcome.error:
                self._stop.wait(FAILURE_PAUSE_S)

    def _stream(self, outcome: Outcome, place: int) -> None:
        turned = self._urls[place % len(self._urls) :] + self._urls[: place % len(self._urls)]
        stream = _TimedStream(turned, outcome.reference.body, outcome.connects)
        try:
            for chunk in stream:
                outcome.request_id = stream.request_id
                outcome.take(chunk)
        except ServerError as error:
            outcome.error = f"ServerError: {error}"
        except Exception as error:  # a client that ends unnoticed would look like a stream that never came
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.request_id = stream.request_id
        outcome.num_resumed = stream.num_resumed
