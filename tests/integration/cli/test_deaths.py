"""A death is in the intake and the leases are gone before any lease could lapse."""

import time
from contextlib import closing
from pathlib import Path

import redis

from services.cli.deaths import DeathReporter, report_death
from services.cli.ports import free_port
from services.cli.redis_server import find_redis_server, prepare
from shared.keys import Keys
from shared.leases import LeaseKeeper, read_members, who
from shared.messages import Decoder, IntakeMessage, Lease, ProcessDied, WorkerState, encode
from shared.redis_client import connect
from shared.scripts import acquire, read_fence
from shared.streams import scan
from tests.harness.own_redis import running

LONG_MS = 60_000


def lease(service: str, name: str, instance: str) -> Lease:
    return Lease(service=service, name=name, instance=instance, pid=1, state=WorkerState.READY)


def hold(client: redis.Redis, keys: Keys, held: Lease) -> str:
    client.set(keys.lease(who(held)), encode(held), px=LONG_MS)
    client.sadd(keys.members, who(held))
    return who(held)


def lead(client: redis.Redis, keys: Keys, held: Lease) -> int:
    return acquire(client, keys, instance=held.instance, ttl_ms=LONG_MS, lease=held)


def deaths(client: redis.Redis, keys: Keys) -> list[str]:
    decoder: Decoder[IntakeMessage] = Decoder(IntakeMessage)
    messages = [decoder.decode(entry.payload) for entry in scan(client, keys.intake)]
    assert all(isinstance(message, ProcessDied) for message in messages)
    return [message.instance for message in messages if isinstance(message, ProcessDied)]


def test_a_workers_leases_end_and_its_death_is_in_the_intake(redis_client: redis.Redis, keys: Keys) -> None:
    first = hold(redis_client, keys, lease("gpu_worker", "worker-0", "aa"))
    again = hold(redis_client, keys, lease("gpu_worker", "worker-0", "aa.1"))
    other = hold(redis_client, keys, lease("gpu_worker", "worker-1", "aab"))
    report_death(redis_client, keys, "aa")
    assert deaths(redis_client, keys) == ["aa", "aa.1"]
    members = read_members(redis_client, keys)
    assert members[first] is None
    assert members[again] is None
    assert members[other] is not None


def test_a_running_keeper_is_cut_off(redis_url: str, redis_client: redis.Redis, keys: Keys) -> None:
    keeper = LeaseKeeper(redis_url, keys, lease("gateway", "gateway-0", "gg"), ttl_s=60.0, interval_s=30.0).start()
    deadline = time.monotonic() + 5
    while keeper.who not in read_members(redis_client, keys):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    report_death(redis_client, keys, "gg")
    assert read_members(redis_client, keys)[keeper.who] is None
    keeper.stop()


def test_the_leaders_death_lets_another_acquire_at_once(redis_client: redis.Redis, keys: Keys) -> None:
    leader, standby = lease("scheduler", "scheduler-0", "s1"), lease("scheduler", "scheduler-1", "s2")
    epoch = lead(redis_client, keys, leader)
    assert epoch > 0
    assert lead(redis_client, keys, standby) == 0
    report_death(redis_client, keys, "s1")
    assert lead(redis_client, keys, standby) == epoch + 1


def test_a_standbys_death_leaves_the_leader_alone(redis_client: redis.Redis, keys: Keys) -> None:
    lead(redis_client, keys, lease("scheduler", "scheduler-0", "s1"))
    report_death(redis_client, keys, "s2")
    assert redis_client.exists(keys.leader_lease)
    assert read_fence(redis_client, keys).leader == "s1"


def test_a_report_waits_for_a_redis_that_is_down(keys: Keys, tmp_path: Path) -> None:
    own = prepare(tmp_path, find_redis_server())
    reporter = DeathReporter(own.url, keys).start()
    reporter.report("aa")
    time.sleep(0.3)
    with running(own), closing(connect(own.url)) as client:
        deadline = time.monotonic() + 5
        while deaths(client, keys) != ["aa"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        reporter.stop()
        assert deaths(client, keys) == ["aa"]


def test_stopping_a_reporter_whose_redis_is_away_does_not_hang(keys: Keys) -> None:
    reporter = DeathReporter(f"redis://127.0.0.1:{free_port()}/0", keys).start()
    reporter.report("aa")
    started = time.monotonic()
    reporter.stop()
    assert time.monotonic() - started < 3.0
