"""Very many requests: clients that leave at any moment, and a soak. Afterwards nothing has grown."""

import asyncio
import time
from collections import Counter

from benchmarks.report import Bar, Row
from tests.harness.audit import Audit
from tests.harness.crowd import Visit, pay_visits, plan_visits
from tests.harness.fault_run import FaultRun, Scene
from tests.harness.sizes import REDIS_DATA, Sizes, held

AT_ONCE = 48
SAMPLES = 100
MOST_GROWTH = 1.1
WARM_UP = 4 * AT_ONCE
"""Requests after which pools of connections have about their size."""
MORE_CONNECTIONS = 4
"""A pool grows when more calls overlap than ever before: descriptors may become more by so many."""
KEEP_S = 60.0
EXPIRY = {
    "PAGEWIRE_RECORD_TTL_S": f"{KEEP_S:g}",
    "PAGEWIRE_USAGE_KEEP_S": f"{KEEP_S:g}",
    "PAGEWIRE_LOG_KEEP_S": "10",
    "PAGEWIRE_LOG_KEEP_BYTES": "1000000",
}
"""Everything that lives for a time lives for a short one, so that growth is growth."""
SETTLED_S = 2 * KEEP_S
"""In a shorter run records still become more in its second half: sizes under load cannot be judged."""


def clients_leave(run: FaultRun) -> None:
    """Most clients leave at a random time: before the answer, in the middle, after the end."""
    _crowd(run, "clients-leave", run.options.requests, leaving=0.7, max_tokens=48)


def soak(run: FaultRun) -> None:
    """Everybody stays."""
    _crowd(run, "soak", run.options.soak, leaving=0.0, max_tokens=16)


def _crowd(run: FaultRun, name: str, count: int, *, leaving: float, max_tokens: int) -> None:
    with run.scene(name, EXPIRY) as scene:
        plan = plan_visits(run.options.seed, scene.references, WARM_UP + count, leaving=leaving, max_tokens=max_tokens)
        audit, sizes = Audit(num_streams=count), Sizes()
        asyncio.run(_send(scene, plan[:WARM_UP], Sizes()))
        before = _at_rest(scene, audit)
        sizes.skip_usage(scene)
        num_before = _num_accepted(scene)
        started = time.monotonic()
        endings = asyncio.run(_send(scene, plan[WARM_UP:], sizes))
        seconds = time.monotonic() - started
        audit.check_idle(scene.pool)
        sizes.read_usage(scene)
        after = _at_rest(scene, audit)
        _check(audit, sizes, endings, _num_accepted(scene) - num_before)
    is_settled = seconds > SETTLED_S
    _tell_sizes(run, name, sizes, is_settled)
    _tell_rest(run, name, before, after)
    run.add_audit(name, audit, left=endings["left"], complete=endings["complete"], seconds=seconds)


def _at_rest(scene: Scene, audit: Audit) -> dict[str, float]:
    """What is held once all is idle and all that expires has expired."""
    audit.check_idle(scene.pool)
    time.sleep(KEEP_S + 2)
    return held(scene)


async def _send(scene: Scene, visits: list[Visit], sizes: Sizes) -> Counter[str]:
    every, one_at_a_time = max(1, len(visits) // SAMPLES), asyncio.Lock()

    async def on_done(number: int) -> None:
        if number % every == 0:
            async with one_at_a_time:
                await asyncio.to_thread(sizes.take, scene)

    return await pay_visits(scene.stack.gateway_urls(), visits, AT_ONCE, on_done)


def _num_accepted(scene: Scene) -> float:
    """Requests whose gateway knows that they were queued; a client that leaves just then is not counted."""
    return sum(scene.stack.metric("request_params_n_count", url) for url in scene.stack.gateway_urls())


def _check(audit: Audit, sizes: Sizes, endings: Counter[str], num_accepted: float) -> None:
    audit.faults += [f"{count} × {how}" for how, count in endings.items() if how not in ("left", "complete")]
    audit.faults += [f"usage of {name}: {number} records" for name, number in sizes.usage.items() if number != 1]
    if not endings["complete"] <= num_accepted <= len(sizes.usage) <= endings.total():
        found = f"{len(sizes.usage)} usage records, {num_accepted:g} requests accepted, {endings['complete']} complete"
        audit.faults.append(f"{found}; records live {KEEP_S:g} s and were not read for {sizes.longest_unread_s:.0f} s")


def _tell_sizes(run: FaultRun, name: str, sizes: Sizes, is_settled: bool) -> None:
    rows = sizes.rows()
    bars = [Bar(f"{name}: growth of {row['what']}", float(row["growth"] or 0), MOST_GROWTH, "times") for row in rows]
    run.report.add(f"{name}: sizes under load", rows, bars if is_settled else [])
    if not is_settled:
        run.report.lacks(f"{name}: growth under load, in less than {SETTLED_S:g} s")
    run.curves[name] = sizes.samples


def _tell_rest(run: FaultRun, name: str, before: dict[str, float], after: dict[str, float]) -> None:
    """Counts at rest: after the crowd there is no more of anything than before it, but for a few connections."""
    rows: list[Row] = [
        {"what": what, "before": before.get(what, 0), "after": after.get(what, 0)} for what in before | after
    ]
    most = {what: count + _room(what, count) for what, count in before.items()}
    grown = [what for what, count in after.items() if count > most.get(what, 0)]
    run.report.add(f"{name}: held at rest", rows, [Bar(f"{name}: counts that grew, at rest", len(grown), 0, "")])


def _room(what: str, before: float) -> float:
    """By how much more than before is no growth."""
    if what == REDIS_DATA:
        return before * (MOST_GROWTH - 1)
    return MORE_CONNECTIONS if what.endswith("descriptors") else 0
