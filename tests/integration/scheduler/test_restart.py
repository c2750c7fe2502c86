"""A leader dies, another takes over: same plans, same texts, and the workers notice nothing."""

import random
import threading
import time
from typing import Any

import msgspec
import pytest

from services.scheduler.service import committer, saving, service
from services.scheduler.service.position import decode_snapshot
from shared.errors import Fenced
from shared.leases import decode_lease
from shared.messages import FIELD, Abort, Decoder, FinishReason, LogMessage, StepResult, Stop, Tick, TickEntry, encode
from shared.redis_client import RedisFailure
from shared.scripts import AppendStatus, commit_ticks, read_fence
from shared.streams import last_id, scan
from tests.integration.scheduler.conftest import LAPSE_S, Pool, Scheduler, wait_for
from tests.integration.scheduler.deadly_commits import DeadlyCommits, Killed

_log: Decoder[LogMessage] = Decoder(LogMessage)


@pytest.mark.parametrize("seed", range(4))
def test_a_leader_killed_around_commits_is_followed_exactly(
    pool: Pool, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the commit, between the commits of a turn, or after it, the reply lost: replay derives the same bytes."""
    caplog.set_level("INFO", "pagewire.scheduler")
    chance = random.Random(seed)
    deadly = DeadlyCommits(chance)
    monkeypatch.setattr(committer, "commit_ticks", deadly)
    workers = [pool.worker("worker-0", num_blocks=40), pool.worker("worker-1", num_blocks=24, step_s=0.003)]
    prefix = [1 + position % 20 for position in range(9)]
    pool.submit(10, max_prompt=20, max_tokens=60, prefix=prefix)
    kills = 0
    while kills < 3:
        scheduler = pool.scheduler(snapshot_interval_s=chance.choice((0.05, 0.3, 5.0)))
        leader = scheduler.take_over()
        deadly.arm()
        try:
            while not all(pool.has_ended(request_id) for request_id in pool.submissions):
                leader.turn(0.05)
            pool.submit(6, max_prompt=20, max_tokens=60, prefix=prefix)
        except Killed:
            kills += 1
        scheduler.crash()
        pool.await_vacancy()
    monkeypatch.setattr(committer, "commit_ticks", commit_ticks)
    pool.scheduler().start()
    pool.wait_until_ended()
    pool.check_texts()
    assert all(worker.incarnations == [1] for worker in workers), "the workers noticed"
    told = pool.told_cached()
    assert told, "nothing was cached"
    for request_id in told:
        final = pool.record(request_id).final
        assert final is not None and final.num_cached_tokens == told[request_id]
    events = [record.getMessage() for record in caplog.records]
    assert events.count("cold_start") == 1 and events.count("ticks_replayed") == 3


def test_a_successor_acquires_once_the_lease_lapses(pool: Pool) -> None:
    pool.worker(step_s=0.003)
    first = pool.scheduler().start()
    pool.submit(8, max_tokens=100)
    wait_for(lambda: pool.steps() > 15)
    first.crash()
    second = pool.scheduler().start()
    pool.wait_until_ended()
    pool.check_texts()
    assert read_fence(pool.client, pool.keys).epoch == 2
    assert second.leader is not None and second.leader.position.core.counters.requeues == 0


def test_of_two_leaders_the_older_one_stops(pool: Pool) -> None:
    """The first leader's lease is lost while it works on: its next commit is refused and it writes nothing more."""
    pool.worker(step_s=0.003)
    first = pool.scheduler()
    leader = first.take_over()
    pool.submit(6, max_tokens=100)
    while pool.steps() < 20:
        leader.turn(0.05)
    first.service._leadership.resign()
    pool.client.delete(pool.keys.leader_lease)
    second = pool.scheduler().start()
    wait_for(lambda: second.leader is not None)
    with pytest.raises(Fenced):
        for _ in range(100):
            leader.turn(0.05)
    pool.wait_until_ended()
    pool.check_texts()


def test_a_leader_notices_by_its_lease_that_another_leads(pool: Pool) -> None:
    first = pool.scheduler(lease_ttl_s=LAPSE_S)  # every renewal looks whether it still leads
    leader = first.take_over()
    leader.run_until_idle()
    pool.client.hset(pool.keys.fence, mapping={"leader": "other", "epoch": "7"})
    with pytest.raises(Fenced):
        for _ in range(100):
            leader.turn(0.02)
            time.sleep(0.01)


def test_a_standby_waits_until_the_leader_resigns(pool: Pool) -> None:
    """SIGTERM gives the lease back: the standby leads well before it would have lapsed, from the saved position."""
    pool.worker(step_s=0.003)
    first = pool.scheduler()
    thread = threading.Thread(target=first.service.run, args=(first.stop_event,), daemon=True)
    thread.start()
    wait_for(lambda: read_fence(pool.client, pool.keys).epoch == 1)
    standby = pool.scheduler().start()
    pool.submit(6, max_tokens=100)
    wait_for(lambda: pool.steps() > 20)
    assert standby.leader is None
    began = time.monotonic()
    first.stop_event.set()
    thread.join()
    wait_for(lambda: standby.leader is not None)
    assert time.monotonic() - began < 3
    pool.wait_until_ended()
    pool.check_texts()


def test_lost_replies_are_repeated_until_answered(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that landed but was not answered counts once."""
    chance = random.Random(1)
    lost = [0]

    def unreliable(client: Any, keys: Any, commits: Any, then: Any) -> list[AppendStatus]:
        if chance.random() < 0.3:
            lost[0] += 1
            landed = chance.randint(0, len(commits))
            if landed:
                commit_ticks(client, keys, commits[:landed])
            raise ConnectionError("reply lost")
        return commit_ticks(client, keys, commits, then)

    monkeypatch.setattr(committer, "commit_ticks", unreliable)
    monkeypatch.setattr(service, "BACKOFF_S", (0.001,))
    pool.worker()
    scheduler = pool.scheduler()
    leader = scheduler.take_over()
    pool.submit(8)
    while not all(pool.has_ended(request_id) for request_id in pool.submissions):
        try:
            leader.turn(0.05)
        except RedisFailure:
            continue
    pool.check_texts()
    assert lost[0] > 10


def _cold_starts(caplog: pytest.LogCaptureFixture) -> int:
    return [record.getMessage() for record in caplog.records].count("cold_start")


@pytest.mark.parametrize(
    "damage",
    ["deleted", "garbage", "cut", "other_blocks", "other_config", "missing_tick", "doubled_tick", "other_plan"],
)
def test_without_a_usable_snapshot_the_pool_starts_cold_and_continues_exactly(
    pool: Pool, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pagewire.scheduler")
    worker = pool.worker(step_s=0.003)
    first = pool.scheduler().start()
    pool.submit(10, max_tokens=100)
    blocks = pool.keys.cached_blocks("worker-0", 1)
    wait_for(lambda: len(worker.statuses) > 40 and bool(pool.client.exists(blocks)))
    data: Any = pool.client.get(pool.keys.snapshot)
    num_steps = len(worker.statuses)
    wait_for(lambda: len(worker.statuses) > num_steps + 10)
    first.crash()
    pool.await_vacancy()  # and results of plans in flight
    pool.client.set(pool.keys.snapshot, data)  # several ticks follow it for sure
    changes: dict[str, object] = {}
    if damage == "deleted":
        pool.client.delete(pool.keys.snapshot)
    elif damage == "garbage":
        pool.client.set(pool.keys.snapshot, b"\x91\xff garbage")
    elif damage == "cut":
        pool.client.set(pool.keys.snapshot, data[: len(data) // 2])
    elif damage == "other_blocks":  # those of another save
        assert decode_snapshot(data).blocks_saved[0][2] > 1
        pool.client.hset(blocks, "tick", 1)
    elif damage == "other_config":
        changes["max_num_batched_tokens"] = 24
    elif damage == "missing_tick":
        plans = pool.keys.plans("worker-0", 1)
        pool.client.xdel(plans, last_id(pool.client, plans))
    elif damage == "other_plan":  # as if a result had not been there
        snapshot = decode_snapshot(data)
        entries = scan(pool.client, pool.keys.steps, after=snapshot.log_id)
        skipped = next(e for e in entries if isinstance(_log.decode(e.payload), StepResult)).entry_id
        pool.client.set(pool.keys.snapshot, encode(msgspec.structs.replace(snapshot, log_id=skipped)))
    else:
        number = decode_snapshot(data).tick + 1
        entry = TickEntry(Tick(number, "0-0", "0-0", 0.0))
        pool.client.xadd(pool.keys.steps, {FIELD: encode(entry)})
    before = _cold_starts(caplog)
    pool.scheduler(**changes).start()
    pool.wait_until_ended()
    pool.check_texts()
    assert _cold_starts(caplog) == before + 1
    assert worker.incarnations == [1, 3], "the worker was fenced, and admitted again under a new name"


def test_a_log_without_its_middle_gives_no_wrong_token(pool: Pool) -> None:
    """Somebody trimmed the step log beyond what was folded: what follows was taken for what was gone."""
    worker = pool.worker(step_s=0.003)
    first = pool.scheduler(fold_interval_s=0.05).start()
    ids = pool.submit(4, max_tokens=300)
    wait_for(lambda: all(pool.record(request_id).seat for request_id in ids))
    folded: dict[str, Any] = {request_id: pool.client.hgetall(pool.keys.request(request_id)) for request_id in ids}
    num_steps = len(worker.statuses)
    wait_for(lambda: len(worker.statuses) > num_steps + 10)
    first.crash()
    pool.await_vacancy()  # and results of plans in flight
    for request_id, fields in folded.items():
        pool.client.hset(pool.keys.request(request_id), mapping=fields)
    steps = [e for e in scan(pool.client, pool.keys.steps) if isinstance(_log.decode(e.payload), StepResult)]
    pool.client.xtrim(pool.keys.steps, minid=steps[-1].entry_id, approximate=False)
    pool.client.delete(pool.keys.snapshot)
    pool.scheduler().start()
    pool.wait_until_ended()
    pool.check_texts()


def test_many_changed_blocks_are_saved_before_the_next_save_is_due(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pagewire.scheduler")
    monkeypatch.setattr(saving, "MANY_BLOCKS", 8)
    monkeypatch.setattr(saving, "BLOCKS_PER_REQUEST", 0)
    pool.worker()
    first = pool.scheduler(snapshot_interval_s=1000.0, fold_interval_s=1000.0)
    leader = first.take_over()
    saved = set()
    for _ in range(4):
        ids = pool.submit(2, min_prompt=30)
        while not all(pool.has_ended(request_id) for request_id in ids):
            leader.turn(0.05)
            data: Any = pool.client.get(pool.keys.snapshot)
            saved.add(decode_snapshot(data).tick if data else 0)
    assert len(saved) > 3
    first.crash()
    pool.submit(2)
    pool.scheduler().start()
    pool.wait_until_ended()
    pool.check_texts()
    assert _cold_starts(caplog) == 1, "the very first start"


def test_a_cold_start_keeps_what_was_told_of_the_cache(pool: Pool) -> None:
    pool.worker(step_s=0.003)
    first = pool.scheduler().start()
    prefix = [1 + position % 20 for position in range(16)]
    pool.submit(1, prefix=prefix, max_tokens=10)
    pool.wait_until_ended()
    (live,) = pool.submit(1, prefix=prefix, max_tokens=150)
    wait_for(lambda: pool.steps() > 40)
    assert pool.told_cached() == {live: 16}
    first.crash()
    pool.client.delete(pool.keys.snapshot)
    pool.scheduler().start()
    pool.wait_until_ended()
    pool.check_texts()
    final = pool.record(live).final
    assert pool.told_cached() == {live: 16} and final is not None and final.num_cached_tokens == 16


def test_an_entry_that_no_plan_can_follow_leads_to_a_cold_start(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """Redis refused every further plan of the stream, and the leader repeated the first one for ever."""
    caplog.set_level("INFO", "pagewire.scheduler")
    worker = pool.worker(step_s=0.003)
    scheduler = pool.scheduler(lease_ttl_s=LAPSE_S)  # it waits for that before it leads again
    thread = threading.Thread(target=scheduler.service.run, args=(scheduler.stop_event,))
    thread.start()
    try:
        pool.submit(6, max_tokens=100)
        wait_for(lambda: len(worker.statuses) > 20)
        plans = pool.keys.plans("worker-0", 1)
        with pool.client.pipeline() as pipe:  # deleted at once, its id still counts
            pipe.xadd(plans, {FIELD: b"foreign"}, id="1000000-0")
            pipe.xdel(plans, "1000000-0")
            pipe.execute()
        pool.wait_until_ended()
    finally:
        scheduler.stop_event.set()
        thread.join(20)
    pool.check_texts()
    assert _cold_starts(caplog) == 2, "the very first start was one, too"
    assert worker.incarnations == [1, 3]


def test_requests_that_a_worker_ended_meanwhile_are_ended_by_a_cold_start(pool: Pool) -> None:
    """The last result is in the log, but no tick has applied it: the records get their ends, not another token."""
    worker = pool.worker()
    first = pool.scheduler()
    leader = first.take_over()
    pool.submit(3, max_tokens=6)
    while sum(message.ended != () for message in _results(pool)) < 1:
        leader.turn(0.01)
    time.sleep(0.1)
    assert not all(pool.has_ended(request_id) for request_id in pool.submissions)
    first.crash()
    worker.kill()
    pool.client.delete(pool.keys.snapshot)
    pool.scheduler().start()
    ended = {request_id for request_id, reason in _ended_in_log(pool)}
    assert ended
    wait_for(lambda: all(pool.has_ended(request_id) for request_id in ended))
    pool.worker()
    pool.wait_until_ended()
    pool.check_texts()


def _results(pool: Pool) -> list[Any]:
    messages = [_log.decode(entry.payload) for entry in scan(pool.client, pool.keys.steps)]
    return [message for message in messages if hasattr(message, "ended")]


def _ended_in_log(pool: Pool) -> list[tuple[str, int]]:
    rows: dict[int, str] = {}
    found = []
    for result in _results(pool):
        rows.update({row: request_id for row, request_id, _ in result.joined})
        found += [(rows[row], reason) for row, reason in result.ended]
    return found


def test_stop_and_abort_that_no_tick_applied_survive_a_cold_start(pool: Pool) -> None:
    worker = pool.worker(step_s=0.01)
    first = pool.scheduler().start()
    stopped, aborted = pool.submit(2, min_prompt=4, max_prompt=8, max_tokens=150)
    wait_for(lambda: len(worker.statuses) > 5)
    first.crash()
    pool.send(Stop(stopped, 60))
    pool.send(Abort(aborted, "cancelled"))
    pool.client.delete(pool.keys.snapshot)
    pool.scheduler().start()
    pool.wait_until_ended()
    record = pool.record(stopped)
    assert record.final is not None and record.final.reason is FinishReason.STOP and len(record.output) == 60
    record = pool.record(aborted)
    assert record.final is not None and record.final.reason is FinishReason.ABORT


def test_the_leaders_lease_says_who_leads(pool: Pool) -> None:
    scheduler: Scheduler = pool.scheduler()
    scheduler.take_over()
    data: Any = pool.client.get(pool.keys.leader_lease)
    lease = decode_lease(data)
    assert lease is not None and lease.instance == scheduler.instance
