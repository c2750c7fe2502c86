"""A picture of the comparison: output tokens a second by concurrency."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.peers.figures import Medians


def write_plot(medians: Medians, concurrency: Sequence[int], path: Path) -> None:
    """Bars in groups, one group for each concurrency; a thin line marks the p99 time between events."""
    names = list(dict.fromkeys(name for name, _ in medians))
    figure = Figure(figsize=(10, 7))
    speed, gaps = figure.subplots(2, 1, sharex=True)
    width = 0.8 / max(len(names), 1)
    for rank, name in enumerate(names):
        at = [group + (rank - (len(names) - 1) / 2) * width for group in range(len(concurrency))]
        found = [medians.get((name, streams)) for streams in concurrency]
        speed.bar(at, [m.tokens_per_s if m else 0.0 for m in found], width, label=name)
        gaps.bar(at, [m.itl_p99 if m else 0.0 for m in found], width)
    speed.set(ylabel="output tokens/s")
    speed.legend(fontsize="small")
    gaps.set(ylabel="p99 time between events, ms", xlabel="streams")
    gaps.set_xticks(range(len(concurrency)), [str(streams) for streams in concurrency])
    for axes in (speed, gaps):
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
