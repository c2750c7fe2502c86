"""What a stack holds: memory, keys, descriptors, threads, tasks; sampled under load, and counted at rest."""

import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.report import Row
from shared.streams import START
from tests.harness.fault_run import Scene

WARM_SHARE = 0.5
"""Of the samples: caches fill, the log reaches its size."""

REDIS_DATA = "Redis data MiB"


@dataclass(slots=True)
class Sizes:
    """Memory under load, and every usage record that came meanwhile."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    usage: Counter[str] = field(default_factory=Counter)
    """Request → its records."""
    longest_unread_s: float = 0.0
    """Between two readings of usage records, which live for a short time here."""
    _usage_read_to: str = START
    _usage_read_at: float = field(default_factory=time.monotonic)

    def take(self, scene: Scene) -> None:
        """One more sample."""
        for footprint in scene.pool.footprints():
            self._add(f"{footprint.name} MiB", footprint.rss_bytes / 2**20)
        self.read_usage(scene)

    def read_usage(self, scene: Scene) -> None:
        """Count the usage records that came since; often enough, so that none has expired."""
        before, self._usage_read_at = self._usage_read_at, time.monotonic()
        self.longest_unread_s = max(self.longest_unread_s, self._usage_read_at - before)
        for entry_id, record in scene.pool.usage_after(self._usage_read_to):
            self._usage_read_to = entry_id
            self.usage[record.request_id] += 1

    def skip_usage(self, scene: Scene) -> None:
        """Count no usage record that is there already."""
        self.read_usage(scene)
        self.usage.clear()
        self.longest_unread_s = 0.0

    def _add(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(value)

    def rows(self) -> list[Row]:
        """Mean of the first samples that count, and of as many last ones."""
        return [self._row(name, values) for name, values in self.samples.items()]

    @staticmethod
    def _row(name: str, values: list[float]) -> Row:
        warm = values[int(len(values) * WARM_SHARE) :]
        part = max(1, len(warm) // 4)
        early, late = sum(warm[:part]) / part, sum(warm[-part:]) / part
        return {"what": name, "early": early, "late": late, "growth": late / early}


def held(scene: Scene) -> dict[str, float]:
    """Counts of everything that is counted, and what Redis holds, which under load depends on how much there is."""
    counts: dict[str, float] = {REDIS_DATA: scene.pool.client.info("memory")["used_memory"] / 2**20}
    for footprint in scene.pool.footprints():
        counts[f"{footprint.name} descriptors"] = footprint.num_fds
        counts[f"{footprint.name} threads"] = footprint.num_threads
    for number, url in enumerate(scene.stack.gateway_urls()):
        counts[f"gateway-{number} tasks"] = scene.stack.metric("gateway_tasks", url)
        counts[f"gateway-{number} live requests"] = scene.stack.metric("gateway_live_requests", url)
    return counts | {f"keys: {kind}": count for kind, count in scene.pool.keys_by_kind().items()}
