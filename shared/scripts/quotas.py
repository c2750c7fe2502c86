"""How much one caller may have at a time; kept in Redis, so that all gateways of a pool count together.

`submit` checks: responses that are live (members of `windows`), and a bucket of tokens that fills at a constant rate.
Prompts are charged when they are accepted, outputs when they end: while the bucket is empty nothing is accepted.
"""

from dataclasses import dataclass
from importlib.resources import files

import redis.asyncio

from shared.keys import Keys

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


def charge(pipe: redis.asyncio.client.Pipeline, keys: Keys, quota: Quota, num_tokens: int) -> None:
    """Take output tokens from the caller's bucket."""
    if quota.tokens_per_s > 0 and num_tokens > 0:
        pipe.eval(_SOURCE, 1, keys.bucket(quota.name), num_tokens, quota.tokens_per_s)
