"""Loads that a mechanism is judged under: made by the simulator's generators, with the same requests in every run."""

from dataclasses import replace
from typing import Any

from services.scheduler.simulator import Piece, Trace, TraceRequest
from services.scheduler.simulator.generators import chat, long_document, poisson
from services.scheduler.simulator.trace import Text


def chats() -> Trace:
    """Conversations of six turns behind one of four system prompts: a turn hits what the turns before it left."""
    return chat(requests=900, rate=1.5, turns=6, systems=4, system=400, prompt=60, output=120, think=4.0, seed=5)


def system_prompts() -> Trace:
    """Single questions behind one of forty system prompts, a few of them far more popular than the others."""
    favoured = chat(requests=500, rate=12.0, turns=1, systems=4, system=600, prompt=80, output=60, seed=6)
    others = chat(requests=400, rate=10.0, turns=1, systems=36, system=600, prompt=80, output=60, seed=7)
    return merged(favoured, others)


def scans() -> Trace:
    """Questions to a few documents, while others read long texts once: a scan pushes out what is used again."""
    asked = long_document(requests=400, rate=4.0, documents=8, document=1200, prompt=40, output=60, seed=8)
    read_once = poisson(requests=300, rate=3.0, prompt=1100, output=40, seed=9)
    return merged(asked, read_once)


def merged(*traces: Trace) -> Trace:
    """Side by side, with names of their own; in the order of arrival, which lets `after` point back."""
    return by_arrival(*(renamed(trace, f"{number}:") for number, trace in enumerate(traces)))


def by_arrival(*traces: Trace) -> Trace:
    """Side by side, with the names that they have."""
    return sorted((request for trace in traces for request in trace), key=lambda request: request.arrival)


def renamed(trace: Trace, prefix: str, **changes: Any) -> Trace:
    """The same requests with names, texts and `changes` of their own."""
    assert not any(request.after for request in trace), "turns are not independent arrivals"
    return [
        replace(
            request,
            request_id=prefix + request.request_id,
            prompt=_renamed_pieces(request.prompt, prefix),
            output=_renamed_pieces(request.output, prefix),
            **changes,
        )
        for request in trace
    ]


def apart(trace: Trace) -> list[TraceRequest]:
    """Every choice as a request that is no choice: nothing says that they belong together, only their prompts do."""
    return [replace(choice, num_choices=1) for request in trace for choice in request.choices()]


def _renamed_pieces(text: Text, prefix: str) -> tuple[Piece, ...]:
    assert isinstance(text, tuple)
    return tuple(Piece(prefix + piece.name, piece.length) for piece in text)
