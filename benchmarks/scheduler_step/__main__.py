"""What the scheduler costs, with the bars that it must keep; exit code 1 if one is missed.

    make bench-scheduler            or    python -m benchmarks.scheduler_step [--json FILE]

Steady decode of the pure core with staggered block boundaries and two plans in flight; the admission of a long prompt;
the leader's whole turn with a real Redis; many workers under one leader. About two minutes.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Bar, Report, Row
from benchmarks.scheduler_step.core_bench import measure_admission, measure_fleet, measure_snapshot, measure_steady
from benchmarks.scheduler_step.leader_bench import measure_leader, own_redis

# Of CPU time: the core waits for nothing, so on an idle machine that is all of it, and on a busy one still its own.
STEADY_BARS_US = {256: 150.0, 1024: 500.0}
ADMISSION_BAR_US = 500.0
LEADER_BAR_US = 300.0
FLEET_BAR_STEPS = 20.0
FLEET_WORKERS = FLEET_ROWS = 64


def figure(row: Row, *names: str) -> float:
    """The sum of a row's figures."""
    return sum(float(row[name] or 0) for name in names)


def steady(report: Report, sizes: Sequence[int], num_steps: int) -> None:
    rows = [measure_steady(num_rows, num_steps) for num_rows in sizes]
    bars = [
        Bar(f"a step at {size} running, mean of CPU time", figure(row, "CPU mean µs"), STEADY_BARS_US[size], "µs")
        for size, row in zip(sizes, rows, strict=True)
        if size in STEADY_BARS_US
    ]
    report.add(f"steady decode, prefix cache on, {num_steps} steps: schedule() + update_from_result()", rows, bars)


def admission(report: Report, num_times: int) -> None:
    rows = [measure_admission(num_times, warm=warm) for warm in (False, True)]
    bars = [
        Bar(
            f"admitting 2,000 tokens, {row['prompt']}",
            figure(row, "add + schedule µs", "result µs"),
            ADMISSION_BAR_US,
            "µs",
        )
        for row in rows
    ]
    report.add("a prompt of 2,000 tokens comes, is computed and leaves: CPU time, medians", rows, bars)
    report.add("a snapshot", [measure_snapshot(160)])


def leader(report: Report, sizes: Sequence[int], num_turns: int) -> None:
    with own_redis() as url:
        rows = [measure_leader(url, num_rows, num_turns) for num_rows in sizes]
        rows.append(measure_leader(url, FLEET_ROWS, max(num_turns // 16, 2), num_workers=FLEET_WORKERS))
    bars = [
        Bar(f"leader's turn at {size} rows, p50", figure(row, "p50 µs"), LEADER_BAR_US, "µs")
        for size, row in zip(sizes, rows, strict=False)
    ]
    bars.append(keeps_up(f"leader of {FLEET_WORKERS} workers × {FLEET_ROWS} rows", rows[-1]))
    report.add("the leader's turn with a real Redis: one read, one step of each worker, one commit", rows, bars)


def fleet(report: Report, num_rounds: int) -> None:
    rows = [measure_fleet(FLEET_WORKERS, FLEET_ROWS, num_rounds, num_output_tokens=length) for length in (0, 256, 64)]
    # The last load shows where it ends: every sixty-fourth token brings a newcomer to be placed.
    bars = [keeps_up(f"core of {FLEET_WORKERS} workers × {FLEET_ROWS} rows, {row['load']}", row) for row in rows[:-1]]
    report.add(f"one core for {FLEET_WORKERS} workers × {FLEET_ROWS} requests", rows, bars)


def keeps_up(name: str, row: Row) -> Bar:
    return Bar(name, figure(row, "steps/s each"), FLEET_BAR_STEPS, "steps/s each", at_least=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    report = Report("scheduler")
    steady(report, (16, 64, 256, 1024), arguments.steps)
    admission(report, 400)
    fleet(report, 100)
    leader(report, (8, 64, 256), arguments.steps)
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
