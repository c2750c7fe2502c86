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
from tests.harness.streams import PATH, Reference

STREAM_MARK = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: how it is asked and when its client leaves."""

    body: dict[str, Any]
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
    return Visit(body, rng.expovariate(2.0) if rng.random() < leaving else None)


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
            return await _ask(url, visit.body)
    except TimeoutError:
        return "left"
    except BrokenAnswer as error:
        return f"broken: {error}"


async def _ask(url: str, body: dict[str, Any]) -> str:
    async with post_json(url, PATH, json.dumps(body).encode(), {}) as answer:
        data = await answer.read()
        if answer.status != 200:
            return f"HTTP {answer.status}"
        is_whole = STREAM_MARK in data if body["stream"] else bool(json.loads(data)["usage"])
        return "complete" if is_whole and b'"error"' not in data else "incomplete"
