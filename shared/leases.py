"""Leases: a process says that it lives, and what it is, every half second. A lease only detects; the fence decides."""

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import redis
import redis.asyncio

from shared.errors import ProtocolError
from shared.keys import Keys
from shared.messages import Decoder, Lease, encode
from shared.redis_client import RedisFailure, connect

LEASE_TTL_S = 2.0
RENEW_INTERVAL_S = 0.5

_decoder: Decoder[Lease] = Decoder(Lease)


def new_instance() -> str:
    """A fresh name for one process start."""
    return secrets.token_hex(8)


def who(lease: Lease) -> str:
    """The name under which a process is known to its peers."""
    return f"{lease.service}:{lease.name}:{lease.instance}"


class LeaseKeeper:
    """Renews one lease from a thread of its own, on a connection of its own, so that nothing else can delay it."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        lease: Lease,
        *,
        ttl_s: float = LEASE_TTL_S,
        interval_s: float = RENEW_INTERVAL_S,
    ) -> None:
        # A renewal that takes longer than the interval is given up, so that one lost packet does not cost the lease.
        self._client = connect(url, timeout_s=max(interval_s, 0.2))
        self._keys = keys
        self._lease = lease
        self._ttl_ms = int(ttl_s * 1000)
        self._interval_s = interval_s
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.refresh: Callable[[], Mapping[str, Any]] = dict
        """Fields that every renewal asks for anew. Called by the keeper's thread."""

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def who(self) -> str:
        return who(self._lease)

    def start(self) -> "LeaseKeeper":
        self._thread.start()
        return self

    def update(self, **changes: Any) -> None:
        """Change fields of the lease and renew at once."""
        self._lease = msgspec.structs.replace(self._lease, **changes)
        self._wake.set()

    def stop(self) -> None:
        """Give the lease back."""
        self._stopped = True
        self._wake.set()
        self._thread.join()
        with suppress(*RedisFailure):  # it lapses by itself
            self._client.delete(self._keys.lease(self.who))
        self._client.close()

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            with suppress(*RedisFailure):  # the next turn tries again; peers see a lapsed lease, which is the truth
                self._renew()
            self._wake.wait(self._interval_s)

    def _renew(self) -> None:
        lease = msgspec.structs.replace(self._lease, **self.refresh())
        with self._client.pipeline(transaction=False) as pipe:
            pipe.set(self._keys.lease(self.who), encode(lease), px=self._ttl_ms)
            pipe.pexpire(self._keys.lease(self.who), self._ttl_ms)  # a full Redis stores nothing new but does this
            pipe.sadd(self._keys.members, self.who)
            pipe.execute()


def decode_lease(data: bytes | None) -> Lease | None:
    """A lease from its stored form; None if it lapsed or is of another version."""
    if data is None:
        return None
    try:
        return _decoder.decode(data)
    except ProtocolError:
        return None


def read_members(client: redis.Redis, keys: Keys) -> dict[str, Lease | None]:
    """Everyone who registered, sorted by name; None for those whose lease lapsed."""
    raw: Any = client.smembers(keys.members)
    names = _names(raw)
    values: Any = client.mget([keys.lease(name) for name in names]) if names else []
    return _members(names, values)


async def read_members_async(client: redis.asyncio.Redis, keys: Keys) -> dict[str, Lease | None]:
    """As `read_members`, for asyncio."""
    raw: Any = await client.smembers(keys.members)
    names = _names(raw)
    values: Any = await client.mget([keys.lease(name) for name in names]) if names else []
    return _members(names, values)


def _names(raw: Iterable[bytes]) -> list[str]:
    """Sorted. Foreign bytes in the set become a name without a lease; they must stop nobody."""
    return sorted(name.decode(errors="replace") for name in raw)


def _members(names: list[str], values: list[bytes | None]) -> dict[str, Lease | None]:
    return {name: decode_lease(value) for name, value in zip(names, values, strict=True)}


def forget_members(client: redis.Redis, keys: Keys, names: list[str]) -> None:
    """Remove names whose leases lapsed long ago."""
    if names:
        client.srem(keys.members, *names)
