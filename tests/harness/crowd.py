"""Very many short requests, of which some are left: raw connections, because a whole client costs more than a request.

A client that leaves closes its connection before the answer's head, in the middle of a stream, or resets it.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from services.cli.load_client import BrokenAnswer, post_json
from services.cli.sse import DONE, SseParser
from tests.harness.streams import PATH, Reference

HALF_CHARACTER = "\ufffd"
"""What stands at the end of a text that breaks off inside a character."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: how it is asked and when its client leaves."""

    body: dict[str, Any]
    text: str
    """What its answer is a beginning of."""
    patience_s: float | None
    """Seconds until the client leaves; None: it waits for the end."""


def plan_visits(
    seed: int, references: Sequence[Reference], count: int, *, leaving: float, max_tokens: int
) -> list[Visit]:
    """`count` requests of up to `max_tokens` tokens, streamed or not; a share of `leaving` is left at a random time."""
    rng = random.Random(seed)
    return [_visit(rng, rng.choice(references), leaving, max_tokens) for _ in range(count)]


def _visit(rng: random.Random, reference: Reference, leaving: float, max_tokens: int) -> Visit:
    body = {**reference.body, "max_tokens": rng.randint(1, max_tokens), "stream": rng.random() < 0.5}
    if not body["stream"]:
        del body["stream_options"]
    return Visit(body, reference.text, rng.expovariate(2.0) if rng.random() < leaving else None)


async def pay_visits(
    urls: Sequence[str], visits: Sequence[Visit], at_once: int, on_done: Callable[[int], Awaitable[None]]
) -> Counter[str]:
    """All visits, `at_once` at a time; how they ended: `complete`, `left`, or an error. `on_done(n)` after the n-th."""
    endings: Counter[str] = Counter()
    waiting = iter(enumerate(visits))

    async def client() -> None:
        for number, visit in waiting:
            endings[await _pay(urls[number % len(urls)], visit)] += 1
            await on_done(endings.total())

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())
    return endings


async def _pay(url: str, visit: Visit) -> str:
    try:
        async with asyncio.timeout(visit.patience_s):
            return await _ask(url, visit)
    except TimeoutError:
        return "left"
    except BrokenAnswer as error:
        return f"broken: {error}"


async def _ask(url: str, visit: Visit) -> str:
    async with post_json(url, PATH, json.dumps(visit.body).encode(), {}) as answer:
        data = await answer.read()
        if answer.status != 200:
            return f"HTTP {answer.status}"
        return judge(visit, _chunks(data) if visit.body["stream"] else [json.loads(data)])


def _chunks(data: bytes) -> list[dict[str, Any]]:
    """Of a whole stream; none if its end lacks."""
    events = [event.data for event in SseParser().feed(data)]
    return [json.loads(event) for event in events[:-1]] if events[-1:] == [DONE] else []


def judge(visit: Visit, chunks: Sequence[dict[str, Any]]) -> str:
    """`complete`, or what is wrong."""
    if not chunks or any("error" in chunk for chunk in chunks):
        return "incomplete"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["text"] for choice in choices)
    if not visit.text.startswith(text.rstrip(HALF_CHARACTER)):
        return "another text"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return "complete" if (counts, reasons) == ([visit.body["max_tokens"]], ["length"]) else "another end"
