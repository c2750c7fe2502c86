"""Endings that are told by final records: none is forgotten because it came while others were looked up."""

import asyncio
from typing import Any

import redis

from services.gateway.streams.channel import TokenChannel
from services.gateway.streams.delivery import Delivery
from services.gateway.streams.live_requests import ReaderCounters
from shared.keys import Keys
from shared.messages import EventKind, Final, FinishReason, RequestEvent, TickEntry, encode
from shared.packing import pack_int32
from shared.records import final_fields
from shared.redis_client import connect_async
from shared.step_log import StepLogFollower
from shared.streams import START, Entry
from tests.fakes.scheduler_world import make_submission


def ended(request_id: str) -> Entry:
    event = RequestEvent(request_id, EventKind.FINISHED, 2, str(FinishReason.STOP))
    return Entry("1-0", encode(TickEntry(None, (event,))))


def test_an_ending_that_comes_while_records_are_read_is_told_by_the_next_reading(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    """As when a response is taken over beside the reader: both wait for Redis at the same time."""
    for request_id in ("a", "b"):
        fields: Any = final_fields(pack_int32([1, 2]), START, Final(FinishReason.STOP, 2))
        fields["submission"] = encode(make_submission(request_id, [1], max_tokens=4))
        redis_client.hset(keys.request(request_id), mapping=fields)
    channels = {i: TokenChannel(i, 4, lambda _: None, wants_record=True) for i in ("a", "b")}
    delivery, follower = Delivery(lambda i: [channels[i]], ReaderCounters()), StepLogFollower()

    async def work() -> None:
        client = connect_async(redis_url)
        for request_id in channels:
            follower.track(request_id)
        delivery.apply(ended("a"), follower)
        reading = asyncio.ensure_future(delivery.end_with_records(client, keys))
        await asyncio.sleep(0)  # it waits for Redis
        assert not reading.done()
        delivery.apply(ended("b"), follower)
        await reading
        assert channels["a"].record is not None and channels["b"].ending is None
        await delivery.end_with_records(client, keys)
        assert channels["b"].record is not None and channels["b"].take(4)[0].tolist() == [1, 2]
        await client.aclose()

    asyncio.run(work())
