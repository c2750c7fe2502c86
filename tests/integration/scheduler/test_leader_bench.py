"""The benchmark of the leader's turn takes one step of each worker in every turn, with a real Redis."""

import pytest

from benchmarks.scheduler_step.leader_bench import LeaderBench, measure_leader


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_turn_takes_a_step_and_sends_a_plan(redis_url: str, num_workers: int) -> None:
    with LeaderBench(redis_url, num_rows=3, num_workers=num_workers) as bench:
        lanes = bench.leader.position.core.lanes
        planned = sum(lane.planned for lane in lanes.values())
        times = bench.turns(20)
        assert len(times) == 20 and all(0 < own <= wall for wall, own in times)
        assert bench.num_steps == 20 * num_workers
        assert sum(lane.planned for lane in lanes.values()) == planned + 20 * num_workers
        assert sum(len(lane.seats) for lane in lanes.values()) == 3 * num_workers


def test_the_table_has_the_bar_s_figure(redis_url: str) -> None:
    row = measure_leader(redis_url, 2, 10)
    assert float(row["p50 µs"] or 0) > float(row["own CPU p50 µs"] or 0) > 0
