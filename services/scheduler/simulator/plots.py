"""Pictures of a report. The only part of the scheduler that needs matplotlib (the extra `plots`)."""

from pathlib import Path
from typing import Any

from services.scheduler.simulator.report import Report
from shared.errors import ConfigError


def write_plots(report: Report, folder: Path) -> list[Path]:
    """`ttft.png`, `itl.png`, `blocks.png` and `queue.png` in `folder`, which is made if it is not there.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'pagewire[plots]'") from error
    figures = {
        "ttft": _shares(Figure(), "time to first token", report.ttft_samples),
        "itl": _shares(Figure(), "time between tokens", report.itl_samples),
        "blocks": _blocks(Figure(), report),
        "queue": _queue(Figure(), report),
    }
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            paths.append(folder / f"{name}.png")
            figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
    except OSError as error:
        raise ConfigError(f"plots cannot be written to {folder}: {error.strerror}") from error
    return paths


def _shares(figure: Any, what: str, samples: tuple[tuple[float, int], ...]) -> Any:
    """Which share of all samples is at most so long."""
    axes = figure.subplots()
    total = samples[-1][1] if samples else 1
    axes.step([1e3 * seconds for seconds, _ in samples], [count / total for _, count in samples], where="post")
    if samples and samples[0][0] > 0:
        axes.set_xscale("log")
    axes.set(xlabel=f"{what}, ms", ylabel="share", ylim=(0, 1))
    axes.grid(alpha=0.3)
    return figure


def _blocks(figure: Any, report: Report) -> Any:
    axes, times = figure.subplots(), [point.at_s for point in report.curve]
    used, cached = [p.used_blocks for p in report.curve], [p.cached_blocks for p in report.curve]
    axes.stackplot(times, used, cached, labels=["in block tables", "kept for prefix hits"])
    axes.set(xlabel="seconds", ylabel="KV blocks of all workers")
    axes.legend(loc="upper right")
    return figure


def _queue(figure: Any, report: Report) -> Any:
    axes, times = figure.subplots(), [point.at_s for point in report.curve]
    axes.plot(times, [point.num_running for point in report.curve], label="running")
    axes.plot(times, [point.num_waiting for point in report.curve], label="waiting")
    axes.set(xlabel="seconds", ylabel="requests")
    axes.legend(loc="upper right")
    return figure
