"""Who answers for a response: the script `attach`, behind typed functions. Its id is that of its first request.

Every attachment has a number; the first gateway holds 0. A response goes on without a client for a window, which the
gateway of its client pushes ahead; so a gateway that dies leaves its responses for the rest of their windows, and needs
nobody to notice. Windows are counted by the clock of Redis.
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import redis.asyncio

from shared.keys import Keys
from shared.messages import Abort, encode

LEAST_HELD_S = 6.0
"""The shortest window of a response whose client is here: more than a push that hangs, a new connection and the next
push take."""

_SOURCE = files(__package__).joinpath("attach.lua").read_text()
# Sent whole each time: it is called when somebody comes or leaves, and in pipelines, where a missing script is trouble.


async def adopt(client: redis.asyncio.Redis, keys: Keys, response_id: str, *, window_s: float) -> int:
    """Take the response over; its attach number, or 0 if there is no such response (any more)."""
    answer: Any = await _call(client, keys, response_id, "adopt", response_id, _ms(window_s))
    return int(answer)


def leave(
    pipe: redis.asyncio.client.Pipeline,
    keys: Keys,
    response_id: str,
    *,
    number: int | None,
    window_s: float,
    aborts: Sequence[Abort],
) -> None:
    """Its client left the gateway that holds `number` (None: all that hold it). It goes on for the window; if that is 0
    the requests in `aborts` are aborted, or will not be queued if they come later than this. Nothing happens if it
    ended, or while others hold it: then the last one decides, or if they are dead, the least window."""
    told = "" if number is None else str(number)
    times = (_ms(window_s), _ms(LEAST_HELD_S))
    _call(pipe, keys, response_id, "leave", response_id, told, *times, *map(encode, aborts))


async def expire(client: redis.asyncio.Redis, keys: Keys, response_id: str, aborts: Sequence[Abort]) -> bool:
    """Give the response up if its window is over; whether it was given up by this call."""
    answer: Any = await _call(client, keys, response_id, "expire", response_id, *map(encode, aborts))
    return bool(answer)


def _call(client: Any, keys: Keys, response_id: str, *args: Any) -> Any:
    names = (keys.request(response_id), keys.windows, keys.intake)
    return client.eval(_SOURCE, len(names), *names, *args)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
