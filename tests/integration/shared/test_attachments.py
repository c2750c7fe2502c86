"""Who holds a response, what its leaving does, and what a submission meets that comes after its client has left."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio

from shared.keys import Keys
from shared.messages import Abort, ResponseHead, Submission
from shared.packing import pack_int32
from shared.redis_client import connect_async
from shared.sampling import SamplingParams
from shared.scripts import Submitted, submit
from shared.scripts.attachments import LEAST_HELD_S, adopt, leave

T = TypeVar("T")
ID = "r"
HEAD = ResponseHead(request_ids=(ID,))
ABORT = Abort(ID, "client_disconnect")


def run(url: str, work: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T:
    async def connected() -> T:
        client = connect_async(url)
        try:
            return await work(client)
        finally:
            await client.aclose()

    return asyncio.run(connected())


async def queue(client: redis.asyncio.Redis, keys: Keys, window_s: float = 60.0) -> Submitted:
    params = SamplingParams(max_tokens=4, seed=1)
    submission = Submission(
        request_id=ID, model="m", kind="completion", created=0.0, prompt_tokens=pack_int32([1, 2]), params=params
    )
    return await submit(client, keys, submission, ttl_s=600, head=HEAD, window_s=window_s)


async def left(
    client: redis.asyncio.Redis,
    keys: Keys,
    number: int | None,
    window_s: float = 0.0,
    aborts: Sequence[Abort] = (ABORT,),
) -> None:
    async with client.pipeline(transaction=False) as pipe:
        leave(pipe, keys, ID, number=number, window_s=window_s, aborts=aborts)
        await pipe.execute()


async def until(client: redis.asyncio.Redis, keys: Keys) -> float:
    """The end of its window, ms."""
    score: Any = await client.zscore(keys.windows, ID)
    return float(score)


async def num_messages(client: redis.asyncio.Redis, keys: Keys) -> int:
    """In intake: the submission, and aborts."""
    return int(await client.xlen(keys.intake))


def test_the_last_of_several_holders_decides_in_whatever_order_they_leave(redis_url: str, keys: Keys) -> None:
    async def work(client: redis.asyncio.Redis) -> None:
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            await client.flushall()
            await queue(client, keys)
            assert [await adopt(client, keys, ID, window_s=60) for _ in range(2)] == [1, 2]
            for number in order[:-1]:
                await left(client, keys, number)
                await left(client, keys, number)  # repeated, because its reply was lost
                assert await num_messages(client, keys) == 1
            await left(client, keys, order[-1])
            assert await num_messages(client, keys) == 2
            assert await client.zcard(keys.windows) == 0

    run(redis_url, work)


def test_nobody_shortens_the_window_of_another_holder(redis_url: str, keys: Keys) -> None:
    async def work(client: redis.asyncio.Redis) -> None:
        await queue(client, keys, window_s=60)
        before = await until(client, keys)
        assert await adopt(client, keys, ID, window_s=1) == 1
        await left(client, keys, 1, window_s=1)
        assert await until(client, keys) >= before
        await left(client, keys, 0, window_s=1)  # the last one says how long it goes on
        assert await until(client, keys) < before

    run(redis_url, work)


def test_who_leaves_for_good_leaves_the_others_time_to_say_that_they_are_there(redis_url: str, keys: Keys) -> None:
    """A gateway that died is one of them, and says nothing."""

    async def work(client: redis.asyncio.Redis) -> None:
        await queue(client, keys, window_s=3600)
        promised = await until(client, keys)
        assert await adopt(client, keys, ID, window_s=60) == 1
        await left(client, keys, 1)
        assert await num_messages(client, keys) == 1
        assert promised - await until(client, keys) > (3600 - 1 - LEAST_HELD_S) * 1000
        await left(client, keys, 1, window_s=60)
        assert promised - await until(client, keys) < 3550 * 1000

    run(redis_url, work)


def test_ending_a_request_asks_no_holder(redis_url: str, keys: Keys) -> None:
    async def work(client: redis.asyncio.Redis) -> None:
        await queue(client, keys)
        await adopt(client, keys, ID, window_s=60)
        await left(client, keys, None)
        assert await num_messages(client, keys) == 2

    run(redis_url, work)


def test_a_submission_that_its_own_leaving_overtook_is_not_queued(redis_url: str, keys: Keys) -> None:
    """The command hung in a connection that was given up, and lands after the client was seen to leave."""

    async def work(client: redis.asyncio.Redis) -> None:
        await left(client, keys, 0)
        assert not (await queue(client, keys)).accepted
        assert await num_messages(client, keys) == 0 and await client.zcard(keys.windows) == 0
        assert 0 < await client.ttl(keys.request(ID)) <= 60

    run(redis_url, work)


def test_one_that_asked_for_a_window_is_queued_all_the_same(redis_url: str, keys: Keys) -> None:
    async def work(client: redis.asyncio.Redis) -> None:
        await left(client, keys, 0, window_s=60)
        assert (await queue(client, keys)).accepted

    run(redis_url, work)
