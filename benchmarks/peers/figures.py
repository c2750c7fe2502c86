"""From measured runs to medians, ratios and bars. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report import Bar, Value
from services.cli.bench import Report

Runs = Mapping[str, Mapping[int, Sequence[Report]]]
"""Contender → concurrency → one report per round."""

BF16 = "pagewire bf16"
INT8 = "pagewire int8"
Q4_0 = "pagewire Q4_0"
VLLM = "vllm bf16"
LLAMA = "llama BF16"
LLAMA_TYPES = (LLAMA, "llama Q8_0", "llama Q4_0")


@dataclass(frozen=True, slots=True)
class Median:
    """Of the rounds, each figure by itself. Times in milliseconds."""

    tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


def median_of(reports: Sequence[Report]) -> Median:
    """Of at least one report."""
    return Median(
        statistics.median(r.output_tokens_per_s for r in reports),
        *(
            statistics.median(getattr(r, name).get(which, 0.0) for r in reports)
            for name in ("ttft_ms", "itl_ms")
            for which in ("p50", "p99")
        ),
    )


@dataclass(frozen=True, slots=True)
class Goal:
    """Pagewire is to be `factor` times as fast as the best of `rivals` at a concurrency."""

    ours: str
    factor: float
    rivals: tuple[str, ...]
    concurrency: int
    compares_itl: bool = False
    """Whether p99 of the time between events must also be no worse than that of each rival."""


GOALS = (
    Goal(BF16, 1.15, (LLAMA,), 1),
    Goal(BF16, 1.7, (VLLM, LLAMA), 8, compares_itl=True),
    Goal(BF16, 1.3, (VLLM, LLAMA), 32, compares_itl=True),
    Goal(BF16, 1.2, (VLLM, LLAMA), 64, compares_itl=True),
    Goal(INT8, 1.6, LLAMA_TYPES, 1),
    Goal(Q4_0, 1.6, LLAMA_TYPES, 1),
    Goal(INT8, 1.7, (VLLM,), 64),
)

Medians = Mapping[tuple[str, int], Median]
"""(contender, concurrency) → median."""


def medians_of(runs: Runs) -> dict[tuple[str, int], Median]:
    """What was measured."""
    return {(name, at): median_of(reports) for name, by in runs.items() for at, reports in by.items() if reports}


def judge(medians: Medians, concurrency: Sequence[int]) -> tuple[list[Bar], list[str]]:
    """Bars of the goals at these concurrencies, and those that cannot be told because a contender was not measured."""
    bars: list[Bar] = []
    untold: list[str] = []
    for goal in GOALS:
        if goal.concurrency not in concurrency:
            continue
        missing = [name for name in (goal.ours, *goal.rivals) if (name, goal.concurrency) not in medians]
        if missing:
            untold.append(f"{goal.ours} against {' and '.join(goal.rivals)} at {goal.concurrency}: no {missing[0]}")
        else:
            bars += _bars(goal, medians)
    return bars, untold


def _bars(goal: Goal, medians: Medians) -> list[Bar]:
    ours = medians[goal.ours, goal.concurrency]
    rivals = {name: medians[name, goal.concurrency] for name in goal.rivals}
    best = max(rivals, key=lambda name: rivals[name].tokens_per_s)
    ratio = ours.tokens_per_s / rivals[best].tokens_per_s
    bars = [Bar(f"{goal.ours} / {best} at {goal.concurrency}", ratio, goal.factor, "×", at_least=True)]
    if goal.compares_itl:
        bars += [
            Bar(f"p99 ITL of {goal.ours} / {name} at {goal.concurrency}", ours.itl_p99 / rival.itl_p99, 1.0, "×")
            for name, rival in rivals.items()
        ]
    return bars


def rows_of(medians: Medians, limits: Mapping[tuple[str, int], float], at: int) -> list[dict[str, Value]]:
    """A table of one concurrency. `limits`: the most tokens/s that the machine could give each contender."""
    ours = medians.get((BF16, at))
    return [
        {
            "server": name,
            "tokens/s": median.tokens_per_s,
            "% of limit": 100 * median.tokens_per_s / limits[name, at],
            "pagewire bf16 is": f"{ours.tokens_per_s / median.tokens_per_s:.2f} ×" if ours else None,
            "ITL p50 ms": median.itl_p50,
            "ITL p99 ms": median.itl_p99,
            "TTFT p50 ms": median.ttft_p50,
            "TTFT p99 ms": median.ttft_p99,
        }
        for (name, concurrency), median in medians.items()
        if concurrency == at
    ]
