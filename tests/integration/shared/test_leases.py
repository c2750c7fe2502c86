"""Leases live while their process renews them, and say the truth soon after it stops."""

import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import redis

from services.scheduler.service.leadership import Leadership
from shared.keys import Keys
from shared.leases import LeaseKeeper, new_instance, read_members, who
from shared.limits import Limits, read_limits
from shared.messages import Lease, WorkerState


def lease() -> Lease:
    return Lease(service="gpu_worker", name="w", instance=new_instance(), pid=1, state=WorkerState.LOADING)


def wait_for(condition: object, seconds: float = 3.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.01)
    return False


def test_a_lease_outlives_its_ttl_while_renewed_and_is_gone_after_stop(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    keeper = LeaseKeeper(redis_url, keys, lease(), ttl_s=0.3, interval_s=0.1).start()
    assert wait_for(lambda: read_members(redis_client, keys) == {keeper.who: keeper.lease})
    time.sleep(0.6)
    assert read_members(redis_client, keys)[keeper.who] == keeper.lease
    keeper.stop()
    assert read_members(redis_client, keys) == {keeper.who: None}


def test_an_update_is_seen_at_once(redis_url: str, redis_client: redis.Redis, keys: Keys) -> None:
    keeper = LeaseKeeper(redis_url, keys, lease(), ttl_s=5.0, interval_s=2.0).start()
    assert wait_for(lambda: redis_client.exists(keys.lease(keeper.who)))
    keeper.update(state=WorkerState.READY, num_blocks=9)

    def ready() -> bool:
        seen = read_members(redis_client, keys)[keeper.who]
        return seen is not None and seen.state is WorkerState.READY and seen.num_blocks == 9

    assert wait_for(ready, 1.0)
    keeper.stop()


def test_a_lease_comes_back_after_redis_lost_it(redis_url: str, redis_client: redis.Redis, keys: Keys) -> None:
    keeper = LeaseKeeper(redis_url, keys, lease(), ttl_s=2.0, interval_s=0.1).start()
    assert wait_for(lambda: redis_client.exists(keys.lease(keeper.who)))
    redis_client.flushall()
    assert wait_for(lambda: who(keeper.lease) in read_members(redis_client, keys))
    keeper.stop()


FULL = "1"
"""Bytes of `maxmemory`: every command that needs memory is refused."""


@pytest.fixture
def full_redis(redis_client: redis.Redis) -> Iterator[Callable[[], object]]:
    """Called, it fills Redis until the test ends."""
    yield lambda: redis_client.config_set("maxmemory", FULL)
    redis_client.config_set("maxmemory", "0")


def test_a_full_redis_costs_no_lease(
    redis_url: str, redis_client: redis.Redis, keys: Keys, full_redis: Callable[[], object]
) -> None:
    """Whoever lives would be fenced otherwise, and its work done again by another one, in the same full Redis."""
    keeper = LeaseKeeper(redis_url, keys, lease(), ttl_s=0.3, interval_s=0.1).start()
    leadership = Leadership(redis_url, keys, Lease("scheduler", "s", new_instance(), 1, WorkerState.READY), ttl_s=0.3)
    assert leadership.try_acquire()
    assert wait_for(lambda: redis_client.exists(keys.lease(keeper.who)))
    full_redis()
    with pytest.raises(redis.OutOfMemoryError):
        redis_client.set(keys.lease("other"), "x")
    time.sleep(0.9)
    assert redis_client.exists(keys.lease(keeper.who), keys.leader_lease) == 2
    leadership.release()
    leadership.close()
    keeper.stop()


def test_every_renewal_asks_for_what_changes_by_itself(redis_url: str, redis_client: redis.Redis, keys: Keys) -> None:
    keeper = LeaseKeeper(redis_url, keys, lease(), ttl_s=2.0, interval_s=0.05)
    renewals = count(1)
    keeper.refresh = lambda: {"num_blocks": next(renewals)}
    keeper.start()

    def told() -> int:
        seen = read_members(redis_client, keys).get(keeper.who)
        return 0 if seen is None else seen.num_blocks

    assert wait_for(lambda: told() >= 3)
    keeper.stop()


def test_foreign_bytes_stop_no_reader(redis_client: redis.Redis, keys: Keys) -> None:
    redis_client.sadd(keys.members, b"\xff\xfe", b"gpu_worker:w:1")
    assert set(read_members(redis_client, keys).values()) == {None}
    redis_client.hset(keys.limits, mapping={b"\xff": b"1", b"left": b"many", b"max_model_len": b"9"})
    assert read_limits(redis_client, keys) == Limits(max_model_len=9)
