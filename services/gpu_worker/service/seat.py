"""Which worker this is, in which incarnation, and whether it still is."""

from dataclasses import dataclass

import redis

from shared.keys import Keys
from shared.scripts import read_fence


@dataclass(frozen=True, slots=True)
class Seat:
    """One incarnation of one worker."""

    keys: Keys
    worker: str
    incarnation: int

    @property
    def plans(self) -> str:
        """The plan stream of this incarnation."""
        return self.keys.plans(self.worker, self.incarnation)

    def is_held(self, client: redis.Redis, *, published: int) -> bool:
        """Whether the fence still knows this incarnation and every step up to `published`.

        A Redis that came back with an older state does not: it forgot steps that were acknowledged.
        """
        fence = read_fence(client, self.keys).workers.get(self.worker)
        return fence is not None and fence.incarnation == self.incarnation and fence.step >= published


def find_seat(client: redis.Redis, keys: Keys, worker: str, instance: str) -> Seat | None:
    """The seat that the leader gave to `instance`, or None if it has not yet."""
    fence = read_fence(client, keys).workers.get(worker)
    if fence is None or fence.holder != instance:
        return None
    return Seat(keys, worker, fence.incarnation)
