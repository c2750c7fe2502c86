"""Names of Redis keys. All keys of a pool share the hash tag `{pool}`, so that scripts work on Redis Cluster."""

import re
from dataclasses import dataclass

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one pool."""

    pool: str = "default"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.pool):
            raise ConfigError(f"pool name {self.pool!r}: letters, digits, dot, dash and underscore only")

    def _key(self, *parts: str) -> str:
        return ":".join((f"pw:{{{self.pool}}}", *parts))

    @property
    def intake(self) -> str:
        """Stream: `IntakeMessage`."""
        return self._key("intake")

    @property
    def steps(self) -> str:
        """Stream, the step log: `LogMessage`."""
        return self._key("steps")

    def plans(self, worker: str, incarnation: int) -> str:
        """Stream: `StepPlan`, entry ids `<plan_id>-0`."""
        return self._key("plans", worker, str(incarnation))

    @property
    def fence(self) -> str:
        """Hash without TTL: see infra/protocol.md, "Fence"."""
        return self._key("fence")

    @property
    def limits(self) -> str:
        """Hash: queue counters and caps, largest request."""
        return self._key("limits")

    @property
    def members(self) -> str:
        """Set of `who` names that have or had a lease."""
        return self._key("members")

    def lease(self, who: str) -> str:
        """String with TTL: `Lease`. The scheduler leader's is `leader`."""
        return self._key("lease", who)

    @property
    def leader_lease(self) -> str:
        return self.lease("leader")

    def request(self, request_id: str) -> str:
        """Hash: `submission`, `output`, `logprobs`, `log_id`, `seat`, `final`; that of a response's first request also
        `head`, `attach` and `holders`, or `gone` alone if its client left before it was queued."""
        return self._key("request", request_id)

    @property
    def request_prefix(self) -> str:
        return self._key("request", "")

    def idempotency(self, tenant: str, key_digest: str) -> str:
        """String with TTL: the request id that a tenant's idempotency key stands for."""
        return self._key("idempotency", tenant, key_digest)

    def callers_responses(self, caller: str) -> str:
        """Set with TTL: the live responses of an API key with a limit, by its name. May hold ended ones too."""
        return self._key("responses", caller)

    def bucket(self, caller: str) -> str:
        """String with TTL: when (ms) the token bucket of an API key will be full again."""
        return self._key("bucket", caller)

    @property
    def usage(self) -> str:
        """Stream: `UsageRecord`, one of every request that ended; trimmed by age."""
        return self._key("usage")

    @property
    def windows(self) -> str:
        """Sorted set: response id → Redis time (ms) at which it is given up unless a gateway pushes that ahead."""
        return self._key("windows")

    @property
    def snapshot(self) -> str:
        """String: the scheduler's state at one tick, but for the cached blocks."""
        return self._key("snapshot")

    def cached_blocks(self, worker: str, incarnation: int) -> str:
        """Hash: the snapshot's part for each cached block of a worker incarnation."""
        return self._key("blocks", worker, str(incarnation))

    @property
    def overview(self) -> str:
        """String with TTL: `PoolOverview`."""
        return self._key("overview")

    @property
    def stats(self) -> str:
        """String with TTL: `PoolStats`."""
        return self._key("stats")
