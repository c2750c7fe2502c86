"""One look at a pool, from what its members publish: leases, the leader's stats and its overview."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import redis

from shared.errors import PagewireError, ProtocolError
from shared.keys import Keys
from shared.leases import decode_lease, read_members
from shared.limits import Limits, read_limits
from shared.messages import Decoder, Lease, Message, PoolOverview, PoolStats
from shared.redis_client import RedisFailure

_stats: Decoder[PoolStats] = Decoder(PoolStats)
_overview: Decoder[PoolOverview] = Decoder(PoolOverview)
M = TypeVar("M", bound=Message)


class PoolUnreachable(PagewireError):
    """Redis does not answer."""


@dataclass(frozen=True, slots=True)
class PoolFrame:
    """What is known now. Without a leader there are no stats: old ones lapse."""

    pool: str
    leader: Lease | None = None
    members: list[Lease] = field(default_factory=list)
    """Whose lease is alive."""
    stats: PoolStats | None = None
    overview: PoolOverview | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def hit_rate(self) -> float | None:
        """Share of tokens that the prefix cache held, since the pool began; None before any were looked up."""
        stats = self.stats
        return stats.prefix_cache_hits / stats.prefix_cache_queries if stats and stats.prefix_cache_queries else None

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """(generated, prefilled) by all workers over the leader's last interval."""
        workers = self.overview.workers if self.overview is not None else ()
        return sum(w.generated_tokens_per_s for w in workers), sum(w.prefilled_tokens_per_s for w in workers)

    def as_json(self) -> bytes:
        """One object with everything."""
        generated, prefilled = self.tokens_per_s
        told = {
            "pool": self.pool,
            "leader": self.leader.instance if self.leader is not None else None,
            "generated_tokens_per_s": generated,
            "prefilled_tokens_per_s": prefilled,
            "hit_rate": self.hit_rate,
            "members": [_plain(lease) for lease in self.members],
            "stats": _plain(self.stats),
            "overview": _plain(self.overview),
            "limits": self.limits,
        }
        return msgspec.json.encode(told)


def read_frame(client: redis.Redis, keys: Keys) -> PoolFrame:
    """
    Raises:
        PoolUnreachable: Redis does not answer.
    """
    try:
        values: Any = client.mget([keys.leader_lease, keys.stats, keys.overview])
        members = [lease for lease in read_members(client, keys).values() if lease is not None]
        limits = read_limits(client, keys)
    except RedisFailure as error:
        raise PoolUnreachable(f"Redis does not answer: {error}") from error
    leader, stats, overview = values
    return PoolFrame(
        keys.pool, decode_lease(leader), members, _decode(_stats, stats), _decode(_overview, overview), limits
    )


def _decode(decoder: Decoder[M], data: bytes | None) -> M | None:
    try:
        return None if data is None else decoder.decode(data)
    except ProtocolError:
        return None  # of another version


def _plain(value: Any) -> Any:
    """Structs as objects with names; on the wire they are arrays."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value
