"""A standby follows the leader tick by tick, and leads where it ended."""

import random
import time

import pytest

from services.scheduler.service import committer, replay
from shared.errors import Fenced
from shared.messages import ProcessDied
from shared.scripts import read_fence
from tests.integration.scheduler.conftest import LAPSE_S, Pool, Scheduler, wait_for
from tests.integration.scheduler.deadly_commits import DeadlyCommits, Killed


def said(caplog: pytest.LogCaptureFixture, event: str) -> int:
    return [record.getMessage() for record in caplog.records].count(event)


def standby_of(pool: Pool, **changes: object) -> Scheduler:
    """A standby that has begun to follow."""
    standby = pool.scheduler(**changes).start()
    wait_for(lambda: pool.health() and standby.service._standby._follower is not None)
    return standby


def bury(victim: Scheduler) -> None:
    wait_for(lambda: isinstance(victim.error, Killed))
    victim.error = None
    victim.crash()


def await_leader(standby: Scheduler) -> None:
    wait_for(lambda: standby.leader is not None)


@pytest.mark.parametrize("seed", range(3))
def test_a_standby_leads_from_the_very_tick_at_which_the_leader_died(
    pool: Pool, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed before a commit, between the commits of a turn or after it, three times; nothing is opened or replayed."""
    caplog.set_level("INFO", "pagewire.scheduler")
    deadly = DeadlyCommits(random.Random(seed))
    monkeypatch.setattr(committer, "commit_ticks", deadly)
    workers = [pool.worker("worker-0", num_blocks=40), pool.worker("worker-1", num_blocks=24, step_s=0.003)]
    prefix = [1 + position % 20 for position in range(9)]
    leading = pool.scheduler()
    leading.start()
    pool.submit(10, max_prompt=20, max_tokens=60, prefix=prefix)
    wait_for(lambda: pool.steps() > 10)
    for _ in range(3):
        standby = standby_of(pool)
        pool.submit(6, max_prompt=20, max_tokens=60, prefix=prefix)
        deadly.arm(leading.service._channel)
        bury(leading)
        await_leader(standby)
        leading = standby
    pool.wait_until_ended()
    pool.check_texts()
    assert all(worker.incarnations == [1] for worker in workers), "the workers noticed"
    assert (
        said(caplog, "took_over_hot") == 3 and said(caplog, "cold_start") == 1 and said(caplog, "ticks_replayed") == 0
    )
    leading.crash()  # what a hot leader saved of the caches is of use to the next one
    pool.await_vacancy()
    pool.submit(6, prefix=prefix)
    pool.scheduler().start()
    pool.wait_until_ended()
    pool.check_texts()
    assert said(caplog, "ticks_replayed") == 1 and said(caplog, "cold_start") == 1


def test_it_follows_workers_that_die_and_come_back(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """The plans of an incarnation that it hears of on the way lie in a stream that it did not read before."""
    caplog.set_level("INFO", "pagewire.scheduler")
    worker = pool.worker(step_s=0.003)
    first = pool.scheduler().start()
    pool.submit(8, max_tokens=100)
    wait_for(lambda: len(worker.statuses) > 10)
    standby = standby_of(pool)
    worker.kill()
    pool.send(ProcessDied(worker.instance))
    other = pool.worker(step_s=0.003)
    wait_for(lambda: len(other.statuses) > 20)
    first.crash()
    await_leader(standby)
    pool.wait_until_ended()
    pool.check_texts()
    assert said(caplog, "took_over_hot") == 1 and other.incarnations == [3]
    assert said(caplog, "standby_begins_anew") == 0


def test_pages_that_end_between_ticks_and_their_inputs_are_followed(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replay, "PAGE", 3)
    caplog.set_level("INFO", "pagewire.scheduler")
    worker = pool.worker(step_s=0.001)
    first = pool.scheduler().start()
    pool.submit(4, max_tokens=100)
    wait_for(lambda: len(worker.statuses) > 5)
    standby = standby_of(pool)
    for _ in range(5):
        pool.submit(8)
    pool.wait_until_ended()
    first.crash()
    await_leader(standby)
    assert said(caplog, "took_over_hot") == 1 and said(caplog, "standby_begins_anew") == 0
    pool.submit(8)
    pool.wait_until_ended()
    pool.check_texts()


def test_a_standby_that_missed_ticks_opens_the_next_snapshot(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """The leader trims what its snapshot covers; a standby that was stopped meanwhile cannot follow any more."""
    caplog.set_level("INFO", "pagewire.scheduler")
    worker = pool.worker(step_s=0.003)
    first = pool.scheduler().start()
    pool.submit(8, max_tokens=200)
    wait_for(lambda: len(worker.statuses) > 10)
    standby = standby_of(pool)
    follower = standby.service._standby._follower
    assert follower is not None
    tick = follower.position.tick
    follower.position.tick -= 3  # as if it had not read them; they will not come again
    wait_for(lambda: pool.health() and said(caplog, "standby_begins_anew") == 1)
    wait_for(lambda: standby.service._standby._follower not in (None, follower))
    first.crash()
    await_leader(standby)
    pool.wait_until_ended()
    pool.check_texts()
    assert said(caplog, "took_over_hot") == 1
    assert standby.leader is not None and standby.leader.position.tick > tick


def test_a_standby_follows_no_further_when_redis_has_gone_back(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """What it followed has not happened any more: it takes over from what Redis has."""
    caplog.set_level("INFO", "pagewire.scheduler")
    worker = pool.worker(step_s=0.003)
    first = pool.scheduler()
    leader = first.take_over()
    pool.submit(8, max_tokens=100)
    while len(worker.statuses) < 10:
        leader.turn(0.05)
    standby = standby_of(pool)
    while len(worker.statuses) < 20:
        leader.turn(0.05)
    wait_for(lambda: standby.service._standby._follower.position.tick == leader.position.tick)  # type: ignore[union-attr]
    with pool.client.pipeline() as pipe:
        pipe.hincrby(pool.keys.fence, "tick", -2)
        pipe.delete(pool.keys.snapshot)
        pipe.execute()
    wait_for(lambda: said(caplog, "standby_begins_anew") >= 1)
    with pytest.raises(Fenced):
        for _ in range(100):
            leader.turn(0.05)
    first.crash()
    await_leader(standby)
    pool.wait_until_ended()
    pool.check_texts()
    assert said(caplog, "took_over_hot") == 0 and said(caplog, "cold_start") == 2


def test_a_takeover_takes_no_longer_than_the_lease(pool: Pool) -> None:
    """From the leader's last commit to the standby's first, with 16 streams."""
    worker = pool.worker(step_s=0.003, max_num_seqs=16)
    first = pool.scheduler(max_num_seqs=16).start()
    pool.submit(16, max_prompt=8, max_tokens=200)
    wait_for(lambda: len(worker.statuses) > 30)
    standby = standby_of(pool, max_num_seqs=16)
    first.crash()
    began, num_steps = time.monotonic(), len(worker.statuses)
    wait_for(lambda: len(worker.statuses) > num_steps + 4)
    assert time.monotonic() - began < LAPSE_S + 0.5
    pool.wait_until_ended()
    pool.check_texts()
    assert read_fence(pool.client, pool.keys).epoch == 2 and standby.error is None
