"""The benchmark of the scheduler measures what it says, at tiny sizes: a core that stood still would be fast."""

import pytest

from benchmarks.scheduler_step import core_bench
from benchmarks.scheduler_step.array_worker import TOKEN, ArrayWorker
from benchmarks.scheduler_step.core_bench import (
    CoreBench,
    measure_admission,
    measure_fleet,
    measure_save,
    measure_steady,
    submission,
)
from shared.messages import EndReason, StepPlan, Tick
from shared.packing import NO_TOKEN, unpack_int32

TICK = Tick(0, "0-0", "0-0", 0.0)


def test_the_array_worker_answers_as_a_worker_would() -> None:
    bench = CoreBench(2, max_num_batched_tokens=8)
    bench.core.add_request(submission(0, 12, max_tokens=2))
    worker = ArrayWorker("w0", 1, 2)
    plans = []
    for _ in range(3):
        scheduled = bench.core.schedule(0.0)
        assert scheduled is not None
        plans.append(scheduled.plan)
        bench.core.update_from_result(worker.step(scheduled.plan))
    assert [plan.chunks for plan in plans] == [((0, 8),), ((0, 4),), ()]
    assert worker.num_tokens == 2
    (finished,) = bench.core.take_finished()
    assert list(unpack_int32(finished.output)) == [TOKEN, TOKEN]
    assert finished.final.end_reason == EndReason.LENGTH
    assert list(unpack_int32(worker.step(StepPlan(4, TICK)).tokens)) == [NO_TOKEN, NO_TOKEN]


def test_the_array_worker_drops_rows_before_and_after_they_joined() -> None:
    bench = CoreBench(2, max_num_batched_tokens=8)
    for index in range(2):
        bench.core.add_request(submission(index, 5 + 20 * index))
    bench.plan()
    bench.answer()
    bench.core.abort_request("request-0", "test")
    bench.core.abort_request("request-1", "test")
    bench.plan()
    (result,) = bench.answers
    assert result.left == (0,) and set(unpack_int32(result.tokens)) == {NO_TOKEN}
    bench.answer()
    bench.check()


def test_steady_decode_makes_every_row_yield_and_some_cross_a_boundary_in_each_step() -> None:
    row = measure_steady(16, 64)
    assert row["running"] == 16 and row["vLLM 0.32 µs"] == 198
    p50, p99 = (float(row[f"{name} µs"] or 0) for name in ("p50", "p99"))
    assert 0 < p50 <= p99
    # 59 bytes and, on average, one new block in 16 rows' steps: two packed numbers.
    assert 40 < float(row["plan bytes"] or 0) < float(row["max bytes"] or 0) + 1 < 90


def test_block_boundaries_are_staggered() -> None:
    bench = CoreBench(64)
    for index in range(64):
        bench.core.add_request(submission(index))
    bench.settle()
    sizes = [len(phase) for phase in bench.core.lanes["w0"].clock.phases()]
    assert sum(sizes) == 64 and max(sizes) <= 8 and sizes.count(0) <= 4


@pytest.mark.parametrize("warm", [False, True])
def test_admission_is_measured_with_and_without_hits(warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_bench, "NUM_PROMPT_TOKENS", 40)
    row = measure_admission(4, warm=warm)
    assert ("warm" in str(row["prompt"])) == warm
    assert float(row["add + schedule µs"] or 0) > 0 < float(row["result µs"] or 0)


def test_a_save_is_of_what_changed_in_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_bench, "NUM_PROMPT_TOKENS", 40)
    row = measure_save(30)
    assert (row["cached blocks"], row["changed"]) == (100.0, 2.0)
    assert 0 < float(row["bytes"] or 0) < float(row["whole bytes"] or 0) / 3


@pytest.mark.parametrize("length", [0, 4])
def test_the_fleet_stays_full(length: int) -> None:
    row = measure_fleet(3, 4, 12, num_output_tokens=length)
    assert float(row["steps/s each"] or 0) == pytest.approx(1e6 / (3 * float(row["CPU µs a step"] or 0)))
    arrivals = float(row["arrivals a round"] or 0)
    assert arrivals == 0 if not length else 1.5 < arrivals < 4.5, "12 rows, of which a quarter ends in a round"
