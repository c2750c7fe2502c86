"""What the scheduler costs, with the bars that it must keep; exit code 1 if one is missed.

    make bench-scheduler            or    python -m benchmarks.scheduler_step [--json FILE]

Steady decode of the pure core with staggered block boundaries and two plans in flight; the admission of a long prompt;
what is saved for a successor; the leader's whole turn with a real Redis; many workers under one leader.

Everything is measured in `--rounds` rounds. The tables and the bars have the round in the middle, with the figure that
orders them of the quietest and of the noisiest round beside it. About two minutes.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.report import Bar, Report, Row, middle_of
from benchmarks.scheduler_step.core_bench import measure_admission, measure_fleet, measure_save, measure_steady
from benchmarks.scheduler_step.leader_bench import awake_cores, measure_leader, measure_reaction, own_redis

# Of CPU time: the core waits for nothing, so on an idle machine that is all of it, and on a busy one still its own.
STEADY_BARS_US = {256: 150.0, 1024: 500.0}
ADMISSION_BAR_US = 500.0
LEADER_BAR_US = 300.0
LEADER_MOST_ROWS = 256
LEADER_MEAN_ROWS = (64,)
"""Here for the mean, too, with saves and pauses of the machine in it: these are the streams that design.md budgets."""
FLEET_BAR_STEPS = 20.0
FLEET_WORKERS = FLEET_ROWS = 64
FLEET = f"{FLEET_WORKERS} workers × {FLEET_ROWS} rows"


def figure(row: Row, name: str) -> float:
    return float(row[name] or 0)


def keeps_up(name: str, row: Row) -> Bar:
    return Bar(name, figure(row, "steps/s each"), FLEET_BAR_STEPS, "steps/s each", at_least=True)


@dataclass(frozen=True, slots=True)
class Bench:
    """Adds its tables to a report."""

    report: Report
    num_rounds: int

    def _row(self, measure: Callable[[], Row], name: str) -> Row:
        """The round in the middle by the figure `name`."""
        return middle_of([measure() for _ in range(self.num_rounds)], name)

    def steady(self, sizes: Sequence[int], num_steps: int) -> None:
        rows = [self._row(partial(measure_steady, size, num_steps), "CPU mean µs") for size in sizes]
        bars = [
            Bar(f"a step at {size} running, mean of CPU time", figure(row, "CPU mean µs"), STEADY_BARS_US[size], "µs")
            for size, row in zip(sizes, rows, strict=True)
            if size in STEADY_BARS_US
        ]
        title = f"steady decode, prefix cache on, {num_steps} steps a round: schedule() + update_from_result()"
        self.report.add(title, rows, bars)

    def admission(self, num_times: int) -> None:
        rows = [self._row(partial(measure_admission, num_times, warm=warm), "in all µs") for warm in (False, True)]
        bars = [
            Bar(f"admitting 2,000 tokens, {row['prompt']}", figure(row, "in all µs"), ADMISSION_BAR_US, "µs")
            for row in rows
        ]
        title = "a prompt of 2,000 tokens comes, is computed and leaves: CPU time, medians (in all: without leaving)"
        self.report.add(title, rows, bars)

    def saves(self) -> None:
        rows = [self._row(partial(measure_save, num_prompts), "µs a save") for num_prompts in (8, 160)]
        title = "a save of the core and of the cached blocks that one prompt of 2,000 tokens changed: CPU time, medians"
        self.report.add(title, rows)

    def fleet(self, num_rounds: int) -> None:
        measures = [
            partial(measure_fleet, FLEET_WORKERS, FLEET_ROWS, num_rounds, num_output_tokens=length)
            for length in (0, 256, 64)
        ]
        rows = [self._row(measure, "CPU µs a step") for measure in measures]
        # The last load shows where it ends: every sixty-fourth token brings a newcomer to be placed.
        bars = [keeps_up(f"core of {FLEET}, {row['load']}", row) for row in rows[:-1]]
        self.report.add(f"one core for {FLEET}", rows, bars)

    def leader(self, sizes: Sequence[int], num_turns: int) -> None:
        with own_redis() as url, awake_cores():
            rows = [self._row(partial(measure_leader, url, size, num_turns), "p50 µs") for size in sizes]
            fleet = partial(measure_leader, url, FLEET_ROWS, max(num_turns // 16, 2), num_workers=FLEET_WORKERS)
            rows.append(self._row(fleet, "mean µs"))
            reactions = [self._row(partial(measure_reaction, url, size, num_turns), "p50 µs") for size in sizes]
        bars = [
            Bar(f"leader's turn at {size} rows, p50", figure(row, "p50 µs"), LEADER_BAR_US, "µs")
            for size, row in zip(sizes, rows, strict=False)
            if size <= LEADER_MOST_ROWS
        ]
        bars += [
            Bar(f"leader's turn at {size} rows, mean", figure(row, "mean µs"), LEADER_BAR_US, "µs")
            for size, row in zip(sizes, rows, strict=False)
            if size in LEADER_MEAN_ROWS
        ]
        bars.append(keeps_up(f"leader of {FLEET}", rows[-1]))
        with own_redis() as url:
            halting = [self._row(partial(measure_leader, url, size, num_turns), "p50 µs") for size in sizes]
        title = "the leader with a real Redis takes one step of each worker: read, decide, commit, chores"
        self.report.add(title, rows, bars)
        self.report.add("the same on cores that halt while they wait", halting)
        self.report.add("a leader in its own process: from publishing a result to having read the next plan", reactions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600, help="of each round of steady decode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    bench = Bench(Report("scheduler"), arguments.rounds)
    bench.steady((16, 64, 256, 1024), arguments.steps)
    bench.admission(200)
    bench.saves()
    bench.fleet(50)
    bench.leader((8, 64, 256, 1024), arguments.steps // 2)
    return bench.report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
