"""What a benchmark prints: tables for people, JSON for programs, and the bars that decide its exit code."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

Value = float | str | None
Row = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured figure and the limit that it must keep."""

    name: str
    measured: float
    limit: float
    unit: str
    at_least: bool = False
    """The limit is a floor, not a ceiling."""

    @property
    def is_met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        verdict = "met   " if self.is_met else "MISSED"
        return f"{verdict}  {self.name}: {shown(self.measured)} {self.unit} ({sign} {shown(self.limit)})"


@dataclass(frozen=True, slots=True)
class Times:
    """Durations in µs."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Of at least two durations."""
        p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
        return cls(statistics.fmean(seconds) * 1e6, statistics.median(seconds) * 1e6, p99 * 1e6)

    def row(self, unit: str = "µs") -> dict[str, Value]:
        """Columns of a table."""
        return {f"mean {unit}": self.mean, f"p50 {unit}": self.p50, f"p99 {unit}": self.p99}


def shown(value: Value) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if value != 0 and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def table(rows: Sequence[Row]) -> str:
    """Aligned columns, named by the first row's keys; text to the left, numbers to the right."""
    names = list(rows[0])
    cells = [names] + [[shown(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    is_text = [isinstance(rows[0][name], str) for name in names]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(line, widths, is_text, strict=True)
        ).rstrip()
        for line in cells
    )


def middle_of(rounds: Sequence[Row], name: str) -> dict[str, Value]:
    """Of several measurements of the same, the one whose figure `name` is in the middle, with the extremes beside it.

    On a machine that others use, one measurement says little, and the least of many says what nobody will see.
    """
    ordered = sorted(rounds, key=lambda row: float(row[name] or 0))
    return {**ordered[len(ordered) // 2], "quietest": ordered[0][name], "noisiest": ordered[-1][name]}


def machine() -> dict[str, Value]:
    """Where it was measured."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].strip() if names else model
    return {"cpu": model, "cores": os.cpu_count() or 0, "python": platform.python_version()}


@dataclass(slots=True)
class Report:
    """Collects what is measured; each table is printed as soon as it is there."""

    title: str
    tables: dict[str, list[Row]] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    """Bars that could not be measured: each counts as missed."""

    def __post_init__(self) -> None:
        about = machine()
        print(f"{self.title}: {about['cpu']}, {about['cores']} cores, Python {about['python']}", flush=True)

    def add(self, name: str, rows: Sequence[Row], bars: Sequence[Bar] = ()) -> None:
        """One table, and the bars that its figures must keep."""
        self.tables[name] = list(rows)
        self.bars += bars
        print(f"\n{name}\n{table(rows)}", flush=True)

    def lacks(self, what: str) -> None:
        """Something that bars need could not be measured."""
        self.untold.append(what)
        print(f"\nNOT MEASURED  {what}", flush=True)

    def finish(self, path: Path | None) -> int:
        """Print the bars, write JSON to `path`; the exit code: 1 if a bar is missed or could not be measured."""
        print(
            "\n" + "\n".join([*map(str, self.bars), *(f"MISSED  not measured: {what}" for what in self.untold)]),
            flush=True,
        )
        if path is not None:
            bars = [
                {"name": b.name, "measured": b.measured, "limit": b.limit, "unit": b.unit, "met": b.is_met}
                for b in self.bars
            ]
            content = {
                "title": self.title,
                "machine": machine(),
                "tables": self.tables,
                "bars": bars,
                "untold": self.untold,
            }
            path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return int(bool(self.untold) or not all(bar.is_met for bar in self.bars))
