"""Notices reach Redis in the end, whatever one of them meets there; a full queue is asked by one at a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis

from services.gateway.streams import intake as module
from services.gateway.streams.intake import Charge, End, Intake, Leave
from shared.errors import QueueFull, Unavailable
from shared.keys import Keys
from shared.limits import write_limits
from shared.messages import Abort, ResponseHead, Stop
from shared.redis_client import connect_async
from shared.scripts.quotas import Quota
from shared.streams import read
from tests.fakes.scheduler_world import make_submission
from tests.harness.lossy_proxy import LossyProxy

FULL = "1"
"""Bytes of `maxmemory`: every command that needs memory is refused."""


@pytest.fixture(autouse=True)
def _room(redis_client: redis.Redis) -> Any:
    yield
    redis_client.config_set("maxmemory", "0")


def with_intake(url: str, keys: Keys, work: Callable[[Intake], Awaitable[None]]) -> None:
    async def run() -> None:
        client = connect_async(url)
        intake = Intake(client, keys, record_ttl_s=60)
        sending = asyncio.create_task(intake.run())
        try:
            await work(intake)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await client.aclose()

    asyncio.run(run())


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("nothing within 10 s")


def num_queued(client: redis.Redis, keys: Keys) -> int:
    return len(read(client, {keys.intake: "0-0"}).get(keys.intake, ()))


def test_what_a_full_redis_refuses_stops_nothing_else_and_is_sent_when_there_is_room(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    for response_id in ("ended", "left"):
        redis_client.zadd(keys.windows, {response_id: 1e15})
        redis_client.hset(keys.request(response_id), "submission", "x")
    redis_client.config_set("maxmemory", FULL)

    async def work(intake: Intake) -> None:
        intake.tell(Stop("left", 3))
        intake.tell(Leave("left", 0, 0.0, (Abort("left", "client_disconnect"),)))
        intake.tell(End("ended"))
        await until(lambda: redis_client.zscore(keys.windows, "ended") is None)
        assert num_queued(redis_client, keys) == 0
        assert redis_client.zscore(keys.windows, "left") is not None, "not aborted, so still to be given up"
        redis_client.config_set("maxmemory", "0")
        await intake.flush()
        assert num_queued(redis_client, keys) == 2 and redis_client.zcard(keys.windows) == 0
        assert intake.num_given_up == 0

    with_intake(redis_url, keys, work)


def test_what_is_refused_for_ever_is_given_up(
    redis_url: str, redis_client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GIVE_UP_S", 0.3)
    redis_client.set(keys.intake, "no stream")

    async def work(intake: Intake) -> None:
        intake.tell(Stop("r", 3))
        async with asyncio.timeout(5):
            await intake.flush()
        assert intake.num_given_up == 1

    with_intake(redis_url, keys, work)


def test_tokens_whose_charge_lost_its_reply_are_charged_once(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    proxy = LossyProxy(redis_url)
    redis_client.hset(keys.request("r"), "submission", "x")

    async def work(intake: Intake) -> None:
        proxy.lose_reply(b"charged")
        intake.tell(Charge("r", Quota("alice", tokens_per_s=1.0), 100))
        await intake.flush()
        assert proxy.num_lost == 1, "it was sent once only"
        milliseconds: Any = redis_client.pttl(keys.bucket("alice"))
        assert 90_000 < milliseconds <= 100_001

    with_intake(proxy.url, keys, work)
    proxy.close()


def test_one_at_a_time_asks_a_queue_that_was_full_until_it_has_room(
    redis_url: str, redis_client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is refused for what is known no more."""
    monkeypatch.setattr(module, "LATELY_S", 10 * module.LATELY_S)  # so that no pause of this machine is longer
    write_limits(redis_client, keys, max_model_len=100, max_request_tokens=100, cap_requests=1, left=0)

    async def submit(intake: Intake, name: str) -> None:
        intake.take_turn()
        await intake.submit([make_submission(name, [1], max_tokens=1)], ResponseHead((name,)), window_s=1, log_id="0-0")

    async def until_known_no_more(intake: Intake) -> None:
        await asyncio.sleep(module.FULL_S)
        intake.check_room()

    async def work(intake: Intake) -> None:
        await submit(intake, "first")
        intake.take_turn()
        with pytest.raises(QueueFull):
            await submit(intake, "second")
        with pytest.raises(QueueFull):
            intake.check_room()
        await until_known_no_more(intake)
        intake.take_turn()
        with pytest.raises(QueueFull):
            intake.take_turn()
        redis_client.hset(keys.limits, "left", 1)
        await until_known_no_more(intake)
        await submit(intake, "third")
        intake.take_turn()
        intake.take_turn()

    with_intake(redis_url, keys, work)
    assert num_queued(redis_client, keys) == 2


def test_a_burst_that_meets_no_redis_is_told_so_without_a_try_each(redis_url: str, keys: Keys) -> None:
    """A few are sent at a time: 400 of them, each tried three times, took half a minute, and hours if Redis hangs."""
    proxy = LossyProxy(redis_url)

    async def submit(intake: Intake, number: int) -> None:
        one = make_submission(f"r{number}", [1], max_tokens=1)
        await intake.submit([one], ResponseHead((one.request_id,)), window_s=60.0, log_id="0-0")

    async def work(intake: Intake) -> None:
        await submit(intake, 0)
        proxy.go_down()
        started = time.monotonic()
        told = await asyncio.gather(*(submit(intake, n) for n in range(1, 401)), return_exceptions=True)
        assert time.monotonic() - started < 5 and all(isinstance(one, Unavailable) for one in told)
        proxy.come_back()
        await submit(intake, 401)

    with_intake(proxy.url, keys, work)
    proxy.close()
