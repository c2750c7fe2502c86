"""Very many requests: clients that leave at any moment, and a soak. Afterwards nothing has grown."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.report import Bar
from tests.harness.audit import Audit
from tests.harness.crowd import Visit, pay_visits, plan_visits
from tests.harness.fault_run import FaultRun, Scene

AT_ONCE = 48
SAMPLES = 40
WARM_SHARE = 0.3
"""Of the samples: caches fill, the log reaches its size."""
MOST_GROWTH = 1.1
EXPIRY = {
    "PAGEWIRE_RECORD_TTL_S": "60",
    "PAGEWIRE_USAGE_KEEP_S": "60",
    "PAGEWIRE_LOG_KEEP_S": "10",
    "PAGEWIRE_LOG_KEEP_BYTES": "1000000",
}
"""Everything that lives for a time lives for a short one, so that growth is growth."""
SETTLED_S = 180.0
"""In a shorter run records are still becoming more: its sizes are told, not judged."""


@dataclass(slots=True)
class _Sizes:
    """Sizes of everything that must not grow, sampled while requests come."""

    samples: dict[str, list[float]] = field(default_factory=dict)

    def take(self, scene: Scene) -> None:
        for footprint in scene.pool.footprints():
            self._add(f"{footprint.name} MiB", footprint.rss_bytes / 2**20)
            self._add(f"{footprint.name} descriptors", footprint.num_fds)
            self._add(f"{footprint.name} threads", footprint.num_threads)
        info = scene.pool.client.info("memory")
        self._add("Redis data MiB", info["used_memory"] / 2**20)

    def _add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def rows(self) -> list[dict[str, float | str | None]]:
        """Mean of the first samples that count, and of as many last ones."""
        return [self._row(name, values) for name, values in self.samples.items()]

    @staticmethod
    def _row(name: str, values: list[float]) -> dict[str, float | str | None]:
        warm = values[int(len(values) * WARM_SHARE) :]
        part = max(1, len(warm) // 4)
        early, late = sum(warm[:part]) / part, sum(warm[-part:]) / part
        return {"what": name, "early": early, "late": late, "growth": late / early}


def clients_leave(run: FaultRun) -> None:
    """Most clients leave at a random time: before the answer, in the middle, after the end."""
    _crowd(run, "clients-leave", run.options.requests, leaving=0.7, max_tokens=200)


def soak(run: FaultRun) -> None:
    """Everybody stays."""
    _crowd(run, "soak", run.options.soak, leaving=0.0, max_tokens=24)


def _crowd(run: FaultRun, name: str, count: int, *, leaving: float, max_tokens: int) -> None:
    with run.scene(name, EXPIRY) as scene:
        keys_before = _lasting(scene)
        visits = plan_visits(run.options.seed, scene.references, count, leaving=leaving, max_tokens=max_tokens)
        sizes, started = _Sizes(), time.monotonic()
        endings = asyncio.run(_send(scene, visits, sizes))
        audit = Audit(num_streams=count, num_tokens=sum(visit.body["max_tokens"] for visit in visits))
        audit.check_idle(scene.pool)
        _check(audit, scene, endings, keys_before)
        seconds = time.monotonic() - started
    rows = sizes.rows()
    is_settled = seconds > SETTLED_S
    run.report.add(f"{name}: sizes", rows, [_bar(name, row) for row in rows] if is_settled else [])
    run.curves[name] = sizes.samples
    run.add_audit(name, audit, left=endings["left"], complete=endings["complete"], seconds=seconds)


async def _send(scene: Scene, visits: list[Visit], sizes: _Sizes) -> Counter[str]:
    every = max(1, len(visits) // SAMPLES)

    async def on_done(number: int) -> None:
        if number % every == 0:
            await asyncio.to_thread(sizes.take, scene)

    return await pay_visits(scene.stack.gateway_urls(), visits, AT_ONCE, on_done)


def _check(audit: Audit, scene: Scene, endings: Counter[str], keys_before: dict[str, int]) -> None:
    audit.faults += [f"{count} × {how}" for how, count in endings.items() if how not in ("left", "complete")]
    keys = _lasting(scene)
    grown = {kind: number for kind, number in keys.items() if number > keys_before.get(kind, 0)}
    audit.faults += [f"{number} keys of kind {kind} that do not expire" for kind, number in grown.items()]
    times = Counter(record.request_id for record in scene.pool.usage())
    audit.faults += [f"usage of {name}: {number} records" for name, number in times.items() if number != 1]
    live = scene.stack.metric("gateway_live_requests")
    audit.faults += [f"{live:g} requests live at a gateway"] if live else []


def _lasting(scene: Scene) -> dict[str, int]:
    return {kind: count for kind, count in scene.pool.keys_by_kind().items() if not kind.endswith("(expires)")}


def _bar(name: str, row: dict[str, float | str | None]) -> Bar:
    return Bar(f"{name}: growth of {row['what']}", float(row["growth"] or 0), MOST_GROWTH, "times")
