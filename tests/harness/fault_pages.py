"""The report of a fault run for people: a page of Markdown and a plot of the recoveries and of what must not grow."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import Row, shown
from tests.harness.fault_run import FaultRun, Recovery
from tests.harness.injector import Hit


def write_pages(run: FaultRun, folder: Path) -> None:
    """`fault.md` and, if there is something to plot, `fault.png`."""
    (folder / "fault.md").write_text(page(run), encoding="utf-8")
    if run.recoveries or run.curves:
        plot(run).savefig(folder / "fault.png", dpi=120, bbox_inches="tight")


def page(run: FaultRun) -> str:
    """Bars first, then every table, then every fault."""
    report = run.report
    lines = [f"# {report.title}", "", *(f"- {bar}" for bar in report.bars)]
    lines += [f"- MISSED  not measured: {what}" for what in report.untold]
    for name, rows in report.tables.items():
        lines += ["", f"## {name}", "", *_markdown(rows)]
    if run.hits:
        lines += ["", "## Faults that hit", "", *_markdown([_hit_row(*hit) for hit in run.hits])]
    return "\n".join(lines) + "\n"


def _hit_row(scenario: str, hit: Hit) -> Row:
    return {
        "scenario": scenario,
        "fault": str(hit.fault.kind),
        "victim": hit.victim,
        "streams in flight": hit.num_in_flight,
    }


def _markdown(rows: Sequence[Row]) -> list[str]:
    names = list(rows[0])
    cells = [[shown(row.get(name)) for name in names] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (names, ["---"] * len(names), *cells)]


def plot(run: FaultRun) -> Figure:
    """One picture of recoveries, one of each scenario in which sizes were sampled."""
    count = len(run.curves) + bool(run.recoveries)
    figure = Figure(figsize=(10, 4.5 * count))
    axes = list(figure.subplots(count, 1, squeeze=False)[:, 0])
    if run.recoveries:
        _plot_recoveries(axes.pop(0), run.recoveries)
    for (name, curves), place in zip(run.curves.items(), axes, strict=True):
        for what, values in curves.items():
            place.plot([value / values[0] for value in values], label=what, linewidth=1)
        place.set(title=name, xlabel="sample", ylabel="size, first sample = 1")
        place.legend(fontsize="x-small", ncols=3)
        place.grid(alpha=0.3)
    return figure


def _plot_recoveries(axes: Axes, recoveries: Sequence[Recovery]) -> None:
    """Share of streams that were served again after so many seconds."""
    for recovery in recoveries:
        pauses = sorted(recovery.pauses)
        shares = [(place + 1) / len(pauses) for place in range(len(pauses))]
        axes.step(pauses, shares, where="post", label=recovery.kind)
    axes.set(xlabel="seconds from the fault to the end of the longest pause", ylabel="share of streams")
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
