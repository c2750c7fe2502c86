"""The benchmark of the leader takes one step of each worker in every round, with a real Redis."""

from collections.abc import Sequence

import pytest

from benchmarks.scheduler_step.leader_bench import LeaderBench, measure_leader, measure_reaction
from shared.channel import Channel, Command


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_round_takes_a_step_and_sends_a_plan(redis_url: str, num_workers: int) -> None:
    with LeaderBench(redis_url, num_rows=3, num_workers=num_workers) as bench:
        lanes = bench.leader.position.core.lanes
        planned = sum(lane.planned for lane in lanes.values())
        answered = sum(lane.answered for lane in lanes.values())
        times = bench.rounds(20)
        assert len(times) == 20 and all(0 < own <= wall for wall, own in times)
        assert 20 <= bench.num_turns <= 20 * num_workers
        assert sum(lane.answered for lane in lanes.values()) == answered + 20 * num_workers
        assert sum(lane.planned for lane in lanes.values()) == planned + 20 * num_workers
        assert sum(len(lane.seats) for lane in lanes.values()) == 3 * num_workers


def _name(command: Command) -> str:
    return command.split(b"\r\n", 3)[2].decode() if isinstance(command, bytes) else str(command[0])


def test_a_turn_is_one_exchange_with_redis(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit and the next read go out together, and every read after the first was sent by the turn before."""
    sent: list[list[str]] = []
    send_all = Channel.send_all
    with LeaderBench(redis_url, num_rows=3) as bench:
        channel = bench.leader._committer._channel

        def spy(self: Channel, commands: Sequence[Command]) -> None:
            if self is channel:
                sent.append([_name(command) for command in commands])
            send_all(self, commands)

        monkeypatch.setattr(Channel, "send_all", spy)
        bench.rounds(20)
    assert sent == [["XREAD"]] + [["EVALSHA", "XREAD"]] * 20  # the turn before the first had nothing to wait for


def test_the_table_has_the_bar_s_figure(redis_url: str) -> None:
    row = measure_leader(redis_url, 2, 10)
    assert float(row["p50 µs"] or 0) > float(row["own CPU p50 µs"] or 0) > 0


def test_a_leader_of_its_own_process_answers_every_result_with_a_plan(redis_url: str) -> None:
    row = measure_reaction(redis_url, 3, 20)
    assert 0 < float(row["p50 µs"] or 0) <= float(row["p99 µs"] or 0)
