"""The short form of the fault tests (`make test-fault` is the long one): the tiny model, one fault of most kinds.

A fault that does not hit is an error, and so is a text, a usage record or an idle state that is not exactly right.
"""

from pathlib import Path

import pytest

from benchmarks.report import Report
from tests.fault.scenarios import kills
from tests.harness.chaos_plan import KILLS, PAUSES, WINDOWS
from tests.harness.fault_run import FaultRun, Options

SHORT = Options(streams=12, seed=5)
KINDS = (
    *KILLS,
    *(pause for pause in PAUSES if pause.service == "gpu_worker"),
    *(window for window in WINDOWS if window.point in ("step_published", "tick_committed", "worker_fenced")),
)


@pytest.fixture
def run(tmp_path: Path) -> FaultRun:
    return FaultRun(SHORT, Report("faults, short form"), tmp_path)


@pytest.mark.timeout(240)
def test_nobody_notices_the_death_of_any_process_or_the_pause_of_a_worker(run: FaultRun) -> None:
    kills.strike_all(run, "short", dict.fromkeys(KINDS, 1))
    assert sorted(hit.fault.kind for _, hit in run.hits) == sorted(KINDS)
    assert all(hit.num_in_flight >= SHORT.streams for _, hit in run.hits)
    assert [str(bar) for bar in run.report.bars if not bar.is_met] == []
    ((row,),) = run.report.tables.values()
    assert float(row["streams"] or 0) > SHORT.streams and float(row["resumed"] or 0) > 0
