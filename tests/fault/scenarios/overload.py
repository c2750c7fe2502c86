"""More requests than there is room for: told at once, and health is told all the while."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter

import psutil

from benchmarks.report import Bar, Row
from services.cli.load_client import BrokenAnswer, post_json
from tests.harness.audit import Audit
from tests.harness.fault_run import FaultRun, Scene
from tests.harness.streams import PATH

CAP, SENT = 50, 200
REFUSAL_LIMIT_S, HEALTH_LIMIT_S = 0.2, 0.5
LONG_PROMPT = {"tiny": 480, "default": 2000}
"""Tokens; the tiny model's context ends at 512."""
HELD_S = 5.0
"""Shorter than a gateway's grace for a pool without a leader."""
ARRIVAL_S = 120.0


def overload(run: FaultRun) -> None:
    """The scheduler stands, so that nothing is admitted: of `SENT` requests all beyond the cap are refused at once."""
    with run.scene("overload", {"PAGEWIRE_MAX_QUEUED_REQUESTS": str(CAP)}, gateways=1) as scene:
        scheduler = psutil.Process(scene.pool.children("scheduler")[0].pid)
        answers = asyncio.run(_flood(scene, scheduler))
        refused = [seconds for status, seconds in answers if status == 429]
        statuses = Counter(status for status, _ in answers)
        audit = Audit(num_streams=SENT)
        audit.check_idle(scene.pool)
        if statuses != {200: CAP, 429: SENT - CAP}:
            audit.faults.append(f"answers by status: {dict(statuses)}")
    slowest = max(refused, default=float("inf"))
    run.report.bars.append(Bar("overload: slowest refusal", slowest, REFUSAL_LIMIT_S, "s"))
    run.add_audit("overload", audit, answered_429=len(refused), slowest_s=slowest)


async def _flood(scene: Scene, scheduler: psutil.Process) -> list[tuple[int, float]]:
    """(status, seconds) of every answer. The scheduler goes on once all that can be refused was."""
    body = json.dumps({"model": scene.stack.model, "prompt": "river", "max_tokens": 4}).encode()

    async def post() -> tuple[int, float]:
        started = time.perf_counter()
        async with post_json(scene.stack.url, PATH, body, {}) as answer:
            return answer.status, time.perf_counter() - started

    scheduler.suspend()
    try:
        tasks = [asyncio.create_task(post()) for _ in range(SENT)]
        await asyncio.wait(tasks, timeout=HELD_S)
    finally:
        scheduler.resume()
    return await asyncio.gather(*tasks)


def health(run: FaultRun) -> None:
    """`/health/live` while very many long prompts arrive at once."""
    length = LONG_PROMPT[run.options.model]
    with run.scene("health", gateways=1) as scene:
        text = _text_of(scene, length)
        times, statuses = asyncio.run(_post_all(scene, text, run.options.posts))
        audit = Audit(num_streams=run.options.posts)
        audit.check_idle(scene.pool, 120.0)
        if statuses["200"] + statuses["live"] < run.options.posts:
            audit.faults.append(f"posts by outcome: {dict(statuses)}")
    p99 = statistics.quantiles(times, n=100, method="inclusive")[98]
    row: Row = {
        "posts": run.options.posts,
        "prompt tokens": length,
        "probes": len(times),
        "p99 s": p99,
        "longest s": max(times),
    }
    run.report.add("health under load", [row], [Bar("health/live: p99", p99, HEALTH_LIMIT_S, "s")])
    run.add_audit("health", audit)


def _text_of(scene: Scene, length: int) -> str:
    """A prompt of at least so many tokens: a word is one token or more."""
    return "river " * (length if scene.run.options.model == "default" else length // 6)


async def _post_all(scene: Scene, text: str, count: int) -> tuple[list[float], Counter[str]]:
    """Times of the health probes while all posts arrive, and how these stood at the end; then their clients leave."""
    body = json.dumps({"model": scene.stack.model, "prompt": text, "max_tokens": 8}).encode()
    probe = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.harness.health_probe",
        f"{scene.stack.url}/health/live",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    statuses: Counter[str] = Counter()

    async def post() -> None:
        async with post_json(scene.stack.url, PATH, body, {}) as answer:
            data = await answer.read()
            statuses["200" if answer.status == 200 else f"{answer.status} {json.loads(data)['error']['code']}"] += 1

    tasks = [asyncio.create_task(post()) for _ in range(count)]
    deadline = time.monotonic() + ARRIVAL_S
    while (arrived := statuses.total() + await _num_live(scene)) < count and time.monotonic() < deadline:
        await asyncio.wait(tasks, timeout=0.5)
    out, _ = await probe.communicate(b"\n")
    statuses["live"] = int(arrived - statuses.total())
    for task in tasks:
        task.cancel()
    failures = [r for r in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(r, BrokenAnswer)]
    statuses["broken"] += len(failures)
    return json.loads(out), statuses


async def _num_live(scene: Scene) -> float:
    return await asyncio.to_thread(scene.stack.metric, "gateway_live_requests")
