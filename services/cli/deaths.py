"""Tells the pool that a process ended, so that failover waits for no lease to lapse."""

import queue
import threading

import redis

from shared.keys import Keys
from shared.leases import decode_lease
from shared.messages import FIELD, ProcessDied, encode
from shared.redis_client import RedisFailure, connect

RETRY_S = 0.1


def report_death(client: redis.Redis, keys: Keys, instance: str) -> None:
    """Append `ProcessDied` and end the leases of `instance`, in one transaction.

    A worker that was fenced registers again as `<instance>.<k>`: those names die with the process too.

    Raises:
        RedisError: Redis is unreachable; nothing was written.
    """
    members: set[bytes] = client.smembers(keys.members)  # type: ignore[assignment]
    names = sorted(name for name in map(bytes.decode, members) if _belongs(name.rpartition(":")[2], instance))
    instances = sorted({instance, *(name.rpartition(":")[2] for name in names)})

    def write(pipe: redis.client.Pipeline) -> None:
        # All schedulers share the leader's lease: the transaction runs again if another takes it meanwhile.
        leader = decode_lease(pipe.get(keys.leader_lease))  # type: ignore[arg-type]
        pipe.multi()
        for each in instances:
            pipe.xadd(keys.intake, {FIELD: encode(ProcessDied(each))})
        for name in names:
            pipe.delete(keys.lease(name))
        if leader is not None and _belongs(leader.instance, instance):
            pipe.delete(keys.leader_lease)

    client.transaction(write, keys.leader_lease)


def _belongs(name: str, instance: str) -> bool:
    return name == instance or name.startswith(f"{instance}.")


class DeathReporter:
    """Reports deaths from a thread of its own, so that a Redis that is down delays no restart; retries until told."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._client = connect(url, timeout_s=1.0)
        self._keys = keys
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deaths", daemon=True)

    def start(self) -> "DeathReporter":
        self._thread.start()
        return self

    def report(self, instance: str) -> None:
        """Queue one report; returns at once."""
        self._queue.put(instance)

    def stop(self) -> None:
        """End the thread; reports that could not be delivered yet are dropped (leases lapse by themselves)."""
        self._stopped.set()
        self._queue.put(None)
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while (instance := self._queue.get()) is not None:
            while not self._delivered(instance) and not self._stopped.wait(RETRY_S):
                pass

    def _delivered(self, instance: str) -> bool:
        try:
            report_death(self._client, self._keys, instance)
        except RedisFailure:
            return False
        return True
