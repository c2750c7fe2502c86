"""How much one caller may have at a time; kept in Redis, so that all gateways of a pool count together.

`submit` checks: responses that are live (members of `windows`), and a bucket of tokens that fills at a constant rate.
Prompts are charged when they are accepted, outputs when they end: while the bucket is empty nothing is accepted.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import redis.asyncio

from shared.keys import Keys
from shared.records import live_heads

_SOURCE = files(__package__).joinpath("charge.lua").read_text()

BURST_S = 60.0
"""The bucket holds what flows in so long."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Of one caller; 0: no limit."""

    name: str
    max_concurrent: int = 0
    tokens_per_s: float = 0.0

    @property
    def is_limited(self) -> bool:
        return self.max_concurrent > 0 or self.tokens_per_s > 0


def charge(pipe: redis.asyncio.client.Pipeline, keys: Keys, response_id: str, quota: Quota, num_tokens: int) -> None:
    """Take the output tokens of a response from the bucket of its caller, who has one. Sent again, it takes nothing."""
    pipe.eval(_SOURCE, 2, keys.bucket(quota.name), keys.request(response_id), num_tokens, quota.tokens_per_s)


async def forget_ended(client: redis.asyncio.Redis, keys: Keys, quota: Quota) -> bool:
    """Take the caller's responses that have ended out of those that count; whether there were any.

    A gateway does so with each, unless it died before: then they would count until their windows are over.
    """
    members: Any = await client.smembers(keys.callers_responses(quota.name))
    response_ids = sorted(name.decode() for name in members)
    live = {head.request_ids[0] for head in await live_heads(client, keys, response_ids)}
    ended = [response_id for response_id in response_ids if response_id not in live]
    if ended:
        await client.zrem(keys.windows, *ended)
    return bool(ended)
