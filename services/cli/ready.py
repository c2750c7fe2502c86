"""When is a stack ready: every worker says so in its lease, and every gateway answers its health check."""

from collections.abc import Sequence
from dataclasses import dataclass

import redis

from services.cli.http_api import is_ready
from shared.keys import Keys
from shared.leases import read_members
from shared.messages import Lease, WorkerState
from shared.redis_client import RedisFailure


@dataclass(frozen=True, slots=True)
class Loading:
    """Where one worker is on its way."""

    name: str
    state: WorkerState | None
    """None before its first lease."""
    progress: float
    warning: str = ""


class Readiness:
    """Follows the workers with these (name, instance) pairs and the gateways at `urls`."""

    def __init__(
        self, client: redis.Redis, keys: Keys, workers: Sequence[tuple[str, str]], urls: Sequence[str]
    ) -> None:
        self._client = client
        self._keys = keys
        self._workers = workers
        self._urls = urls
        self.reason = "nothing has started yet"
        """Why the stack is not ready, for people."""

    def workers(self) -> list[Loading]:
        """The state of every worker."""
        try:
            leases = list(read_members(self._client, self._keys).values())
        except RedisFailure as error:
            self.reason = f"Redis: {error}"
            leases = []
        return [self._loading(name, instance, leases) for name, instance in self._workers]

    def _loading(self, name: str, instance: str, leases: Sequence[Lease | None]) -> Loading:
        for lease in leases:
            if lease is not None and lease.instance.partition(".")[0] == instance:
                return Loading(name, lease.state, lease.progress, lease.warning)
        return Loading(name, None, 0.0)

    def is_ready(self, workers: Sequence[Loading]) -> bool:
        """Whether clients can be served now by all of `workers`."""
        behind = [worker.name for worker in workers if worker.state is not WorkerState.READY]
        if behind:
            self.reason = f"{', '.join(behind)} still loading"
            return False
        self.reason = next((reason for url in self._urls if (reason := is_ready(url))), "")
        return not self.reason
