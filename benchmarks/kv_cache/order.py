"""From the simulator: what the order of waiting requests is worth, by class: bounded bypass, and the policies."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, quantiles
from typing import Any

from benchmarks.kv_cache.simulation import CPU, run
from benchmarks.kv_cache.traces import by_arrival, merged, renamed
from benchmarks.report import Value
from services.scheduler.core.policies.base import PolicyName
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.ticks import TickOutcome
from services.scheduler.simulator import Report, Trace
from services.scheduler.simulator.generators import bimodal, poisson
from services.scheduler.simulator.trace import num_tokens
from shared.messages import Tick

# ---------------------------------------------------------------- bypass

BYPASSES = (0, 4, 16, 1000)
LONG_FROM = 1000
"""Tokens of a prompt."""


def measure_bypass(requests: int) -> list[dict[str, Value]]:
    """A tenth of the prompts takes half of a worker's blocks; the others need little, and come behind them."""
    trace = bimodal(requests=requests, rate=0.45, share=0.1, prompt=100, long=3000, output=80, seed=3)
    long_ones = {request.request_id for request in trace if num_tokens(request.prompt) >= LONG_FROM}
    rows: list[dict[str, Value]] = []
    for most in BYPASSES:
        report = run(trace, CPU, num_blocks=400, max_bypasses=most)
        rows.append(
            {
                "most bypasses": str(most),
                **ttft_columns("short", seconds_of(report, lambda name: name not in long_ones)),
                **ttft_columns("long", seconds_of(report, lambda name: name in long_ones)),
                "output tokens/s": report.output_tokens_per_s,
            }
        )
    return rows


def seconds_of(report: Report, belongs: Callable[[str], bool], part: str = "ttft") -> list[float]:
    """TTFT, or latency, of one class of requests."""
    return [getattr(client, part) for client in report.clients if belongs(client.request_id)]


def ttft_columns(name: str, seconds: Sequence[float]) -> dict[str, Value]:
    return {
        f"{name}: TTFT mean s": fmean(seconds),
        f"{name}: p99 s": quantiles(seconds, n=100, method="inclusive")[98],
    }


# ---------------------------------------------------------------- policies

ROWS = 16
URGENT, BULK = 0, 10
"""Priorities; the ageing of 60 s puts ten minutes between them."""


def measure_policies(requests: int) -> list[dict[str, Value]]:
    """One tenant sends long requests all at once, another one a short one every five seconds; and Jain's index."""
    bulk = poisson(requests=requests, rate=100.0, prompt=400, output=300, seed=1)
    urgent = poisson(requests=requests, rate=0.2, prompt=60, output=60, seed=2)
    trace = by_arrival(
        renamed(bulk, "bulk:", tenant="bulk", priority=BULK),
        renamed(urgent, "urgent:", tenant="urgent", priority=URGENT),
    )
    rows: list[dict[str, Value]] = []
    for policy in PolicyName:
        report = run(trace, CPU, num_blocks=2000, max_num_seqs=ROWS, policy=policy)
        bulk_latency = seconds_of(report, lambda name: name.startswith("bulk"), "latency")
        rows.append(
            {
                "policy": str(policy),
                **ttft_columns("urgent", seconds_of(report, lambda name: name.startswith("urgent"))),
                "bulk: latency mean s": fmean(bulk_latency),
                "output tokens/s": report.output_tokens_per_s,
                "Jain index": jain(served_while_backlogged(policy)),
            }
        )
    return rows


def backlogs() -> Trace:
    """Two tenants who both have more to do than they get: other sizes, other numbers."""
    one = poisson(requests=200, rate=1000.0, prompt=400, output=100, seed=4)
    other = poisson(requests=120, rate=600.0, prompt=50, output=150, seed=5)
    return merged(renamed(one, "", tenant="one"), renamed(other, "", tenant="other"))


def served_while_backlogged(
    policy: PolicyName, since: float = 20.0, until: float = 140.0, **options: Any
) -> Counter[str]:
    """Tokens by tenant in the seconds between, in which both have requests waiting."""
    watch = Watch(since, until)
    run(backlogs(), CPU, num_blocks=2000, max_num_seqs=ROWS, policy=policy, on_tick=watch, **options)
    return watch.served


class Watch:
    """Looks at every tick: what did each tenant get until then?"""

    def __init__(self, since: float, until: float) -> None:
        self._since, self._until = since, until
        self._ended: Counter[str] = Counter()
        self._at_start: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        """Prompt tokens computed and output tokens between the two times."""

    def __call__(self, core: SchedulerCore, tick: Tick, *rest: Any) -> None:
        outcome: TickOutcome = rest[-1]
        for finished in outcome.finished:
            submission = finished.submission
            assert submission is not None
            self._ended[submission.tenant] += len(submission.prompt_tokens) // 4 + finished.num_generated_tokens
        if tick.now <= self._since:
            self._at_start = self._total(core)
        elif tick.now <= self._until:
            self.served = self._total(core) - self._at_start
            assert len({request.submission.tenant for request in core.waiting}) == 2, "both must be backlogged"

    def _total(self, core: SchedulerCore) -> Counter[str]:
        total = self._ended.copy()
        for lane in core.lanes.values():
            for seat in lane.seats.values():
                total[seat.request.submission.tenant] += lane.num_written(seat)
        return total


def jain(served: Counter[str]) -> float:
    """Jain's index of fairness: 1 if all got the same, 1/n if one got all."""
    return served.total() ** 2 / (len(served) * sum(tokens**2 for tokens in served.values()))
