"""Workers die, hang, come back, ask for admission: who is alive, and that no text suffers."""

import time
from functools import partial
from typing import Any

import pytest

from services.scheduler.core import known_worker
from services.scheduler.service import workers
from services.scheduler.service.leader import Leader
from shared.leases import read_members
from shared.messages import Decoder, LogMessage, PoolStats, ProcessDied, StepResult, WorkerFenced
from shared.scripts import AppendStatus, publish_step, read_fence
from shared.streams import scan
from tests.fakes.live_worker import LiveWorker
from tests.integration.scheduler.conftest import Pool, Scheduler, wait_for

_log: Decoder[LogMessage] = Decoder(LogMessage)


def _fences(pool: Pool) -> list[tuple[int, str]]:
    """(incarnation that ended, why) of every fence entry."""
    messages = [_log.decode(entry.payload) for entry in scan(pool.client, pool.keys.steps)]
    return [(m.incarnation, m.reason) for m in messages if isinstance(m, WorkerFenced)]


def _holder(pool: Pool, name: str = "worker-0") -> str:
    seat = read_fence(pool.client, pool.keys).workers.get(name)
    return seat.holder if seat is not None else ""


def _run(pool: Pool, scheduler: dict[str, Any] | None = None, **options: Any) -> tuple[LiveWorker, Scheduler]:
    """A pool in the middle of 8 requests."""
    worker = pool.worker(step_s=0.003, **options)
    leading = pool.scheduler(**(scheduler or {})).start()
    pool.submit(8, max_tokens=100)
    wait_for(lambda: len(worker.statuses) > 15)
    return worker, leading


def test_a_reported_death_is_fenced_at_once_and_the_successor_continues(pool: Pool) -> None:
    worker, scheduler = _run(pool, lease_ttl_s=30.0)
    worker.kill()
    began = time.monotonic()
    pool.send(ProcessDied(worker.instance))
    wait_for(lambda: pool.health() and _holder(pool) == "", 3)
    assert time.monotonic() - began < 3, "the lease would have lasted 30 s"
    pool.worker()
    pool.wait_until_ended()
    pool.check_texts()
    assert (1, "process_died") in _fences(pool)
    assert scheduler.leader is not None and scheduler.leader.position.core.counters.requeues >= 4


def test_a_worker_that_came_back_is_fenced_by_the_name_of_its_process(pool: Pool) -> None:
    """The supervisor knows a process by the instance that it gave; fenced once, it serves as `<instance>.1`."""
    worker, _ = _run(pool, lease_ttl_s=1.0)
    process = worker.instance
    worker.pause()
    wait_for(lambda: pool.health() and _holder(pool) == "")
    worker.resume()
    pool.submit(8, max_tokens=100)
    wait_for(lambda: pool.health() and _holder(pool) == f"{process}.1")
    worker.kill()
    pool.send(ProcessDied(process))
    wait_for(lambda: (3, "process_died") in _fences(pool))
    pool.worker()
    pool.wait_until_ended()
    pool.check_texts()


def test_a_death_that_nobody_reports_is_noticed_by_the_lease(pool: Pool) -> None:
    worker, _ = _run(pool, lease_ttl_s=0.4)
    time.sleep(1.1)  # the leader has seen the leases for long enough to trust a missing one
    worker.kill()
    wait_for(lambda: (1, "lease_lapsed") in _fences(pool))
    pool.worker()
    pool.wait_until_ended()
    pool.check_texts()


def test_a_death_is_noticed_while_intake_is_held(pool: Pool) -> None:
    """All plans are in flight at a hung worker; the report must not wait behind intake that is held back."""
    worker, _ = _run(pool, lease_ttl_s=30.0)
    worker.pause()
    time.sleep(0.1)
    pool.submit(2)
    pool.send(ProcessDied(worker.instance))
    began = time.monotonic()
    wait_for(lambda: pool.health() and _holder(pool) == "", 3)
    assert time.monotonic() - began < 3
    pool.worker()
    pool.wait_until_ended()
    pool.check_texts()


def test_a_hung_worker_is_fenced_and_its_late_result_is_refused(pool: Pool) -> None:
    worker, _ = _run(pool, lease_ttl_s=0.4)
    time.sleep(1.1)
    pool.submit(8, max_tokens=100)
    wait_for(lambda: pool.health() and len(worker.statuses) > 20)
    worker.pause()
    wait_for(lambda: (1, "lease_lapsed") in _fences(pool))
    worker.resume()
    wait_for(lambda: AppendStatus.STALE in worker.statuses)
    pool.wait_until_ended()
    pool.check_texts()
    assert worker.incarnations == [1, 3], "it came back under a new instance name"


def test_a_worker_that_hangs_in_a_step_is_fenced_although_its_heart_beats(pool: Pool) -> None:
    """Its requests go on at another one, and itself comes back once the step is over."""
    worker, _ = _run(pool, scheduler={"step_deadline_s": 0.3, "stall_after_s": 0.2}, lease_ttl_s=30.0)
    worker.stall()
    wait_for(lambda: pool.health() and _stats(pool).stall_reason == "step")
    wait_for(lambda: (1, "step_deadline") in _fences(pool))
    assert any("worker-0" in name and lease for name, lease in read_members(pool.client, pool.keys).items())
    other = pool.worker("worker-1")
    pool.wait_until_ended()
    assert len(other.statuses) > 10
    worker.resume()
    wait_for(lambda: worker.incarnations == [1, 3])
    assert worker.statuses[-1] is AppendStatus.STALE
    wait_for(lambda: dict(_stats(pool).refused_writes) == {"worker-0": 1} and _stats(pool).stall_reason == "")
    pool.submit(8)
    pool.wait_until_ended()
    pool.check_texts()


def _stats(pool: Pool) -> PoolStats:
    data: Any = pool.client.get(pool.keys.stats)
    decoder: Decoder[PoolStats] = Decoder(PoolStats)
    return decoder.decode(data)


def test_a_slow_worker_is_not_taken_for_a_hanging_one(pool: Pool) -> None:
    """Case 105. The deadline begins anew with every result."""
    worker = pool.worker(step_s=0.2)
    pool.scheduler(step_deadline_s=0.3).start()
    pool.submit(3, max_tokens=12)
    pool.wait_until_ended()
    pool.check_texts()
    assert worker.incarnations == [1] and len(worker.statuses) > 6


def test_a_worker_whose_step_is_lost_from_the_log_is_fenced_and_its_requests_continue(pool: Pool) -> None:
    """Case 110. No later step of it has a place without that one: its requests would wait for ever."""
    worker = pool.worker()
    leader = pool.scheduler().take_over()
    pool.submit(6, max_tokens=60)
    while len(worker.statuses) < 10:
        leader.turn(0.05)
    read_to = leader.position.log_id
    wait_for(lambda: len(_unread_steps(pool, read_to)) == 2)  # both plans in flight are answered
    pool.client.xdel(pool.keys.steps, _unread_steps(pool, read_to)[1])  # the first is on its way to the leader
    until = time.monotonic() + 20
    while not all(pool.has_ended(request_id) for request_id in pool.submissions):
        leader.turn(0.05)
        assert time.monotonic() < until, "the requests wait for ever"
    pool.check_texts()
    assert (1, "result_contradicts_plan") in _fences(pool)
    assert worker.incarnations == [1, 3]


def _unread_steps(pool: Pool, after: str) -> list[str]:
    """Ids of the step results behind entry `after`."""
    entries = scan(pool.client, pool.keys.steps, after=after)
    return [entry.entry_id for entry in entries if isinstance(_log.decode(entry.payload), StepResult)]


def test_a_worker_that_misses_renewals_but_is_not_fenced_just_goes_on(pool: Pool) -> None:
    worker, _ = _run(pool, lease_ttl_s=30.0)
    worker.stop_renewing()
    pool.wait_until_ended()
    pool.check_texts()
    assert worker.incarnations == [1] and set(worker.statuses) == {AppendStatus.OK}


def test_a_living_holder_keeps_its_seat(pool: Pool) -> None:
    first, _ = _run(pool)
    second = pool.worker()
    pool.wait_until_ended()
    pool.check_texts()
    assert _holder(pool) == first.instance and second.incarnations == []
    first.stop()
    pool.workers.remove(first)
    wait_for(lambda: _holder(pool) == second.instance)
    pool.submit(2)
    pool.wait_until_ended()
    pool.check_texts()


@pytest.mark.parametrize(
    "wrong",
    [{"block_size": 8}, {"max_model_len": 128}, {"max_num_seqs": 4}, {"num_blocks": 2**40}, {"num_cpu_blocks": -1}],
)
def test_an_unfitting_worker_is_refused_and_the_log_says_why(
    pool: Pool, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pool.worker(**wrong)
    pool.scheduler().start()
    wait_for(lambda: any(r.getMessage() == "worker_refused" for r in caplog.records))
    refusals: list[Any] = [r for r in caplog.records if r.getMessage() == "worker_refused"]
    assert next(iter(wrong)) in refusals[0].fields["reason"]
    time.sleep(0.6)
    assert len([r for r in caplog.records if r.getMessage() == "worker_refused"]) == 1, "said once"
    assert _holder(pool) == ""


def _join_two(pool: Pool, **options: Any) -> tuple[LiveWorker, LiveWorker, Leader]:
    workers = [pool.worker(name, **options) for name in ("worker-0", "worker-1")]
    scheduler = pool.scheduler().start()
    wait_for(lambda: scheduler.leader is not None and len(scheduler.leader.position.core.lanes) == 2)
    assert scheduler.leader is not None
    return workers[0], workers[1], scheduler.leader


def test_a_draining_worker_gets_nothing_new(pool: Pool) -> None:
    old, other, _ = _join_two(pool, step_s=0.002)
    old.drain()
    wait_for(lambda: pool.health() and old.has_left, 3)
    pool.submit(6)
    pool.wait_until_ended()
    pool.check_texts()
    assert old.statuses == [] and len(other.statuses) > 10
    assert (1, "drained") in _fences(pool)


def test_requests_of_a_draining_worker_go_on_at_another(pool: Pool) -> None:
    """Case 99: the drain is over long before the requests are."""
    old, other, leader = _join_two(pool, step_s=0.03, num_blocks=400)
    pool.submit(8, max_tokens=200)
    wait_for(lambda: pool.health() and min(len(old.statuses), len(other.statuses)) > 8)
    num_before = len(old.statuses)
    old.drain()
    wait_for(lambda: pool.health() and old.has_left, 2)
    assert sum(pool.has_ended(request_id) for request_id in pool.submissions) < 4
    assert len(old.statuses) - num_before < 50
    pool.wait_until_ended()
    pool.check_texts()
    counters = leader.position.core.counters
    assert counters.handovers >= 2 and counters.requeues == 0
    assert (1, "drained") in _fences(pool)


def test_requests_of_the_only_worker_end_there_before_it_goes(pool: Pool) -> None:
    """Case 98. What comes meanwhile waits for the next worker."""
    worker, _ = _run(pool)
    worker.drain()
    time.sleep(0.4)
    assert not worker.has_left
    later = pool.submit(2)
    wait_for(lambda: pool.health() and worker.has_left)
    assert all(pool.has_ended(request_id) for request_id in set(pool.submissions) - set(later))
    pool.worker()
    pool.wait_until_ended()
    pool.check_texts()
    assert (1, "drained") in _fences(pool)


def test_a_restarted_leader_does_not_fence_a_worker_that_lives(pool: Pool) -> None:
    worker, first = _run(pool)
    first.crash()
    pool.scheduler().start()
    pool.wait_until_ended()
    time.sleep(1.3)  # past the time in which missing leases prove nothing
    assert worker.incarnations == [1] and len(_fences(pool)) == 1


def test_a_worker_admitted_by_a_leader_that_died_before_the_tick_still_joins(pool: Pool) -> None:
    """Between `fence_worker` and the tick that carries `WorkerJoined` lies a moment in which the leader may die."""
    worker = pool.worker()
    first = pool.scheduler()
    leader = first.take_over()
    while _holder(pool) == "":
        leader.turn(0.01)
    assert not leader.position.core.lanes
    first.crash()
    pool.scheduler().start()
    pool.submit(3)
    pool.wait_until_ended()
    pool.check_texts()
    assert worker.incarnations == [1]


def test_names_that_never_come_again_do_not_pile_up(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 106: every container has a name of its own. A standby follows all of them; the first one comes back."""
    caplog.set_level("INFO", "pagewire.scheduler")
    monkeypatch.setattr(workers, "MOST_VACANT", 3)
    monkeypatch.setattr(known_worker, "MOST_ABSENT", 3)
    leading, standby = pool.scheduler().start(), pool.scheduler()
    names = [f"worker-{number:02}" for number in range(12)]
    for name in names:
        worker = pool.worker(name)
        if name == names[1]:
            standby.start()
            wait_for(lambda: pool.health() and standby.service._standby._follower is not None)
        pool.submit(1)
        pool.wait_until_ended()
        worker.kill()
        pool.send(ProcessDied(worker.instance))
        wait_for(partial(_is_vacant, pool, name))
    wait_for(lambda: pool.health() and len(read_fence(pool.client, pool.keys).workers) == 3)
    back = pool.worker(names[0])
    pool.submit(2)
    pool.wait_until_ended()
    assert leading.leader is not None and len(leading.leader.position.core.known_workers) <= 4
    assert back.incarnations[0] > 1, "that number was given before"
    late = publish_step(pool.client, pool.keys, worker=names[0], incarnation=1, step_id=99, payload=b"late")
    assert late is AppendStatus.STALE
    wait_for(lambda: len(_followed(standby)) <= 4)
    leading.crash()
    pool.submit(2)
    pool.wait_until_ended()
    pool.check_texts()
    assert [record.getMessage() for record in caplog.records].count("took_over_hot") == 1
    assert len(back.incarnations) == 1


def _followed(standby: Scheduler) -> list[str]:
    """Plan streams that it reads."""
    follower = standby.service._standby._follower
    assert follower is not None
    return list(follower._plans)


def _is_vacant(pool: Pool, name: str) -> bool:
    return pool.health() and _holder(pool, name) == ""


def test_names_of_the_dead_leave_the_members(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 106."""
    monkeypatch.setattr(workers, "FORGET_AFTER_S", 0.2)
    worker = pool.worker()
    pool.scheduler().start()
    wait_for(lambda: _holder(pool) == worker.instance)
    assert len(read_members(pool.client, pool.keys)) == 1
    worker.kill()
    wait_for(lambda: read_members(pool.client, pool.keys) == {})
