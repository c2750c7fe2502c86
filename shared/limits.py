"""What gateways must know to refuse early: the queue's counters and caps, and the largest request that can ever fit."""

from dataclasses import dataclass, fields
from typing import Any

import redis
import redis.asyncio

from shared.keys import Keys


@dataclass(frozen=True, slots=True)
class Limits:
    """The `limits` hash. `submitted*` are counted by the script `submit`, the rest is written by the leader."""

    submitted: int = 0
    submitted_tokens: int = 0
    left: int = 0
    """Requests that have left the queue since the beginning, by being scheduled or by ending."""
    left_tokens: int = 0
    cap_requests: int = 0
    """Most queued requests; 0 = no cap."""
    cap_tokens: int = 0
    """Most queued prompt tokens; 0 = no cap."""
    max_request_tokens: int = 0
    """Prompt plus `max_tokens` that can ever fit; 0 = no worker has joined yet."""
    max_model_len: int = 0
    max_rows: int = 0
    """Rows of a worker's batch: a beam search needs one per beam; 0 = not told."""
    max_blocks: int = 0
    """KV blocks of the largest worker; 0 = not told."""
    block_size: int = 0

    @property
    def queued(self) -> int:
        return self.submitted - self.left

    @property
    def queued_tokens(self) -> int:
        return self.submitted_tokens - self.left_tokens

    @property
    def is_full(self) -> bool:
        """Whether a cap of the queue is reached."""
        too_many = 0 < self.cap_requests <= self.queued
        return too_many or 0 < self.cap_tokens <= self.queued_tokens


def _parse(raw: dict[bytes, bytes]) -> Limits:
    names = {f.name for f in fields(Limits)}
    values = {k.decode(errors="replace"): v for k, v in raw.items()}
    return Limits(**{name: int(v) for name, v in values.items() if name in names and v.removeprefix(b"-").isdigit()})


def read_limits(client: redis.Redis, keys: Keys) -> Limits:
    raw: Any = client.hgetall(keys.limits)
    return _parse(raw)


async def read_limits_async(client: redis.asyncio.Redis, keys: Keys) -> Limits:
    raw: Any = await client.hgetall(keys.limits)
    return _parse(raw)


def write_limits(client: redis.Redis, keys: Keys, **changes: int) -> None:
    """Set some fields; `client` may be a pipeline."""
    client.hset(keys.limits, mapping={name: int(value) for name, value in changes.items()})
