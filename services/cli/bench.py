"""Load over HTTP: N requests at a concurrency, streamed, greedy, with a fixed seed. Measures what a client sees."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from services.cli.load_client import Answer, BrokenAnswer, post_json
from services.cli.sse import DONE, Event, SseParser
from services.cli.words import random_prompt, random_token_ids

MAX_ERRORS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Load:
    """What to send."""

    url: str
    model: str
    num_requests: int = 64
    concurrency: int = 16
    prompt_words: int = 64
    prompt_tokens: int = 0
    """If not 0: prompts are this many random token ids instead of words."""
    output_tokens: int = 64
    seed: int = 0
    timeout_s: float = 600.0
    api_key: str = ""


@dataclass(slots=True)
class Sample:
    """What one request saw; times in seconds."""

    started: float
    first_token: float = 0.0
    last_token: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Times between events that carry text. An event may carry several tokens."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    done: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The measured run. Times in milliseconds."""

    concurrency: int
    requests: int
    completed: int
    errors: int
    error_messages: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    """Between events with text, as a reader sees them."""
    tpot_ms: dict[str, float]
    """Per request: time after the first token, divided by the number of tokens after it."""


def make_bodies(load: Load) -> list[dict[str, Any]]:
    """The request bodies; equal for equal loads."""
    rng = random.Random(load.seed)
    prompts: list[Any] = [
        random_token_ids(rng, load.prompt_tokens) if load.prompt_tokens else random_prompt(rng, load.prompt_words)
        for _ in range(load.num_requests)
    ]
    return [_body(load, prompt) for prompt in prompts]


def _body(load: Load, prompt: Any) -> dict[str, Any]:
    return {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def run_load(load: Load) -> Report:
    """Send the load and measure it."""
    bodies = iter([json.dumps(body).encode() for body in make_bodies(load)])
    samples: list[Sample] = []
    started = time.perf_counter()

    async def send_until_empty() -> None:
        for body in bodies:
            samples.append(await _send(load, body))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(load.concurrency, load.num_requests)):
            group.create_task(send_until_empty())
    return summarize(load, samples, time.perf_counter() - started)


async def _send(load: Load, body: bytes) -> Sample:
    sample = Sample(started=time.perf_counter())
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    try:
        async with asyncio.timeout(load.timeout_s), post_json(load.url, "/v1/completions", body, headers) as answer:
            if answer.status != HTTPStatus.OK:
                sample.error = f"HTTP {answer.status}: {_error_message(await answer.read())}"
            else:
                await _read_stream(answer, sample)
    except (BrokenAnswer, TimeoutError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    if not sample.error and not sample.done:
        sample.error = "stream ended without [DONE]"
    return sample


async def _read_stream(answer: Answer, sample: Sample) -> None:
    parser = SseParser()
    async for piece in answer.pieces():
        now = time.perf_counter()
        for event in parser.feed(piece):
            _record(event, now, sample)


def _record(event: Event, now: float, sample: Sample) -> None:
    if event.data == DONE:
        sample.done = True
        return
    message = json.loads(event.data)
    if message.get("error"):
        sample.error = str(message["error"].get("message", "error"))
    if usage := message.get("usage"):
        sample.output_tokens = usage["completion_tokens"]
        sample.prompt_tokens = usage["prompt_tokens"]
    if not any(choice.get("text") for choice in message.get("choices", ())):
        return
    if sample.first_token:
        sample.gaps.append(now - sample.last_token)
    else:
        sample.first_token = now
    sample.last_token = now


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def summarize(load: Load, samples: Sequence[Sample], duration_s: float) -> Report:
    """Fold samples into a report. Failed requests count as errors and into no time."""
    good = [sample for sample in samples if not sample.error]
    errors = Counter(sample.error for sample in samples if sample.error)
    output_tokens = sum(sample.output_tokens for sample in good)
    return Report(
        concurrency=load.concurrency,
        requests=len(samples),
        completed=len(good),
        errors=len(samples) - len(good),
        error_messages=dict(errors.most_common(MAX_ERRORS_SHOWN)),
        duration_s=round(duration_s, 3),
        prompt_tokens=sum(sample.prompt_tokens for sample in good),
        output_tokens=output_tokens,
        output_tokens_per_s=round(output_tokens / duration_s, 2),
        requests_per_s=round(len(good) / duration_s, 3),
        ttft_ms=spread([sample.first_token - sample.started for sample in good if sample.first_token]),
        itl_ms=spread([gap for sample in good for gap in sample.gaps]),
        tpot_ms=spread([_per_token(sample) for sample in good if sample.output_tokens > 1]),
    )


def _per_token(sample: Sample) -> float:
    return (sample.last_token - sample.first_token) / (sample.output_tokens - 1)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile (nearest rank) in milliseconds; empty if there is nothing."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        "mean": round(sum(ordered) / len(ordered) * 1e3, 3),
        "p50": round(percentile(ordered, 50) * 1e3, 3),
        "p99": round(percentile(ordered, 99) * 1e3, 3),
    }


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Nearest rank: the smallest value that at least `percent` of all are not above."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
