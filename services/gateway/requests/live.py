"""What can be told of requests without their text: from the leader's overview, their heads and their final records.

The overview is read first: the leader drops from it only what has its final record, so whatever ended meanwhile is told
as ended, and never as one that nobody has seen yet.
"""

from collections.abc import Sequence
from typing import Any

import redis.asyncio

from shared.errors import ProtocolError
from shared.keys import Keys
from shared.messages import MOST_NAMED, Abort, Decoder, PoolOverview, RequestOverview, ResponseHead
from shared.records import NO_SEAT, RequestRecord, live_heads
from shared.scripts import attachments

MOST = 1000
"""Responses in an answer, and looked at in one exchange with Redis."""
MOST_PAGES = 20
_STATES = ("running", "swapped", "waiting")
"""That of a response is the first one that a sequence of it has."""
_overview: Decoder[PoolOverview] = Decoder(PoolOverview)

Json = dict[str, Any]


async def list_live(client: redis.asyncio.Redis, keys: Keys, tenant: str, now: float) -> tuple[list[Json], bool]:
    """Live responses of one tenant, oldest first, and whether there may be more than could be looked at."""
    overviews = await read_overviews(client, keys)
    found, has_more = await _heads_of(client, keys, tenant)
    own = sorted(found, key=lambda head: (head.created, head.request_ids))[:MOST]
    known = await _read_folded(client, keys, own, overviews) | overviews
    return [_live(head, known, now) for head in own], has_more


async def _heads_of(client: redis.asyncio.Redis, keys: Keys, tenant: str) -> tuple[list[ResponseHead], bool]:
    """Of all tenants' responses those of one, page by page; whether there may be more."""
    own: dict[str, ResponseHead] = {}
    for page in range(MOST_PAGES):
        ids: Any = await client.zrange(keys.windows, page * MOST, (page + 1) * MOST - 1)
        heads = await live_heads(client, keys, [name.decode() for name in ids])
        own |= {head.request_ids[0]: head for head in heads if head.tenant == tenant}
        if len(ids) < MOST:
            return list(own.values()), len(own) > MOST
        if len(own) > MOST:
            break
    return list(own.values()), True


def describe(
    head: ResponseHead, records: Sequence[RequestRecord], overviews: dict[str, RequestOverview], now: float
) -> Json:
    """One response, live or ended; `overviews` is older than `records`."""
    ended = [record.final for record in records if record.final is not None]
    if len(ended) == len(records):
        return _head(head, now) | {
            "state": "finished",
            "finish_reasons": [str(final.reason) for final in ended],
            "output_tokens": sum(final.num_output_tokens for final in ended),
            "blocks": 0,
        }
    is_crowded = _is_crowded(overviews)
    folded = [
        _folded(r.submission.request_id, r.seat is not None, r.final is not None, len(r.output), is_crowded)
        for r in records
    ]
    return _live(head, {one.request_id: one for one in folded} | overviews, now)


async def cancel(client: redis.asyncio.Redis, keys: Keys, head: ResponseHead) -> None:
    """End the response, whoever holds it; nothing happens if it has ended."""
    aborts = [Abort(request_id, "cancelled") for request_id in head.request_ids]
    async with client.pipeline(transaction=False) as pipe:
        attachments.leave(pipe, keys, head.request_ids[0], number=None, window_s=0, aborts=aborts)
        await pipe.execute()


def _live(head: ResponseHead, known: dict[str, RequestOverview], now: float) -> Json:
    """`state` is `accepted` while the scheduler has not told of it; `blocks` of one that it does not name is null."""
    parts = [known[request_id] for request_id in head.request_ids]
    states = {part.state for part in parts}
    is_named = all(part.worker for part in parts if part.state == "running")
    waiting = next((part for part in parts if part.reason), None)
    return _head(head, now) | {
        "state": next((state for state in _STATES if state in states), "accepted"),
        "output_tokens": sum(part.num_output_tokens for part in parts),
        "blocks": sum(part.num_blocks for part in parts) if is_named else None,
        "preemptions": sum(part.num_preemptions for part in parts),
        "waiting_reason": waiting.reason if waiting is not None else None,
        "waiting_detail": waiting.detail if waiting is not None else None,
    }


def _head(head: ResponseHead, now: float) -> Json:
    return {
        "id": head.request_ids[0],
        "object": "request",
        "created": int(head.created),
        "age_s": round(max(0.0, now - head.created), 3),
        "sequences": len(head.request_ids),
        "prompt_tokens": head.num_prompt_tokens,
    }


async def _read_folded(
    client: redis.asyncio.Redis, keys: Keys, heads: Sequence[ResponseHead], overviews: dict[str, RequestOverview]
) -> dict[str, RequestOverview]:
    """Every sequence of these responses that the overview, which is bounded, does not name, as its record has it."""
    is_crowded = _is_crowded(overviews)
    others = [request_id for head in heads for request_id in head.request_ids if request_id not in overviews]
    async with client.pipeline(transaction=False) as pipe:
        for request_id in others:
            pipe.hmget(keys.request(request_id), "seat", "final")
            pipe.hstrlen(keys.request(request_id), "output")
        values: list[Any] = await pipe.execute()
    return {
        request_id: _folded(request_id, (seat or NO_SEAT) != NO_SEAT, final is not None, size // 4, is_crowded)
        for request_id, (seat, final), size in zip(others, values[::2], values[1::2], strict=True)
    }


def _is_crowded(overviews: dict[str, RequestOverview]) -> bool:
    """Whether more may wait than are named."""
    return sum(one.state == "waiting" for one in overviews.values()) >= MOST_NAMED


def _folded(
    request_id: str, is_seated: bool, is_ended: bool, num_output_tokens: int, is_crowded: bool
) -> RequestOverview:
    """A sequence as its record has it, some seconds old."""
    state, reason = ("waiting", "behind") if is_crowded else ("accepted", "")
    if is_seated or is_ended:
        state, reason = "finished" if is_ended else "running", ""
    return RequestOverview(request_id, state, 0, num_output_tokens, 0, 0.0, reason=reason)


async def read_overviews(client: redis.asyncio.Redis, keys: Keys) -> dict[str, RequestOverview]:
    """What the leader last said of each live sequence, by its id."""
    data: Any = await client.get(keys.overview)
    try:
        overview = _overview.decode(data) if data is not None else PoolOverview(0.0)
    except ProtocolError:
        overview = PoolOverview(0.0)
    return {one.request_id: one for one in (*overview.running, *overview.swapped, *overview.waiting)}
