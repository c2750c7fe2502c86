"""What a simulation found, for programs and for people."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from services.scheduler.simulator.measures import Distribution, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker's name, all incarnations together."""

    name: str
    num_steps: int
    num_tokens: int
    """Output tokens."""
    busy_share: float
    """Of the time in which it was there."""


class ClientReport(NamedTuple):
    """One request that came to its end. Seconds."""

    request_id: str
    arrival: float
    ttft: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Durations are seconds of virtual time, shares between 0 and 1, means over time if nothing else is said."""

    duration_s: float
    """From the first arrival to the last token."""
    finished: Mapping[str, int]
    """Requests by `FinishReason`; those with no tokens are in no figure below."""
    unfinished: int
    """Requests that nobody could serve, e.g. because the last worker died."""
    num_prompt_tokens: int
    """Of requests that were admitted."""
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft: Distribution
    itl: Distribution
    queue_time: Distribution
    """From arrival to first admission."""
    latency: Distribution
    """From arrival to the last token."""

    num_steps: int
    busy_share: float
    """Of all workers' time: how much they spent in steps."""
    step_s: Distribution
    mean_decode_rows: float
    """Per step."""
    budget_share: float
    """Of the token budget, per step."""

    running_mean: float
    running_peak: int
    waiting_mean: float
    waiting_peak: int
    used_share: float
    """Of all blocks: in block tables."""
    used_share_peak: float
    cached_share: float
    """Of all blocks: kept for prefix hits only."""
    waste_share: float
    """Of the slots in block tables: how many hold no token (the end of the last block)."""
    hit_rate: float
    """Of the tokens that requests had at their admissions: cached on the worker."""
    num_hit_tokens: int
    num_evictions: int
    num_preemptions: int
    num_requeues: int
    """Requests whose worker died or left."""
    num_recomputed_tokens: int
    """Computed again after a preemption or a worker's death."""
    swapped_out_blocks: int
    swapped_in_blocks: int
    copied_blocks: int
    """Within a worker's KV cache (copy-on-write)."""
    num_plans: int
    num_ticks: int
    workers: tuple[WorkerReport, ...] = ()

    ttft_samples: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    """(seconds, requests up to it), by seconds."""
    itl_samples: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    curve: tuple[Point, ...] = field(default=(), repr=False)
    clients: tuple[ClientReport, ...] = field(default=(), repr=False)
    """In order of arrival."""

    def to_dict(self) -> dict[str, Any]:
        """All figures, without what plots are drawn from and single requests."""
        left_out = ("ttft_samples", "itl_samples", "curve", "clients")
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def lines(self) -> Iterator[str]:
        """For people."""
        finished = ", ".join(f"{reason} {count}" for reason, count in self.finished.items() if count) or "none"
        unfinished = f", unfinished {self.unfinished}" if self.unfinished else ""
        yield f"requests      {finished}{unfinished}, in {self.duration_s:.1f} s"
        yield (
            f"throughput    {self.requests_per_s:.2f} requests/s, {self.output_tokens_per_s:.0f} output tokens/s "
            f"({self.num_prompt_tokens} tokens in, {self.num_output_tokens} out)"
        )
        for name, found in (
            ("TTFT", self.ttft),
            ("ITL", self.itl),
            ("queue time", self.queue_time),
            ("latency", self.latency),
            ("step", self.step_s),
        ):
            yield f"{name:13} {_milliseconds(found)}"
        yield (
            f"steps         {self.num_steps}, workers busy {self.busy_share:.1%}, "
            f"{self.mean_decode_rows:.1f} decode rows and {self.budget_share:.1%} of the token budget per step"
        )
        yield (
            f"requests at a time: running {self.running_mean:.1f} (peak {self.running_peak}), "
            f"waiting {self.waiting_mean:.1f} (peak {self.waiting_peak})"
        )
        yield (
            f"blocks        used {self.used_share:.1%} (peak {self.used_share_peak:.1%}), kept for hits "
            f"{self.cached_share:.1%}, waste {self.waste_share:.2%}, evicted {self.num_evictions}"
        )
        yield f"prefix cache  hit rate {self.hit_rate:.1%} ({self.num_hit_tokens} tokens)"
        yield (
            f"preemptions   {self.num_preemptions}, requeues {self.num_requeues}, tokens computed again "
            f"{self.num_recomputed_tokens}; blocks copied: out {self.swapped_out_blocks}, in {self.swapped_in_blocks}, "
            f"within {self.copied_blocks}"
        )
        for worker in self.workers:
            yield (
                f"{worker.name:13} {worker.num_steps} steps, {worker.num_tokens} tokens, busy {worker.busy_share:.1%}"
            )


def _milliseconds(found: Distribution) -> str:
    names = ("mean", "p50", "p90", "p99", "max")
    return "  ".join(f"{name} {1e3 * getattr(found, name):9.1f}" for name in names) + " ms"
