"""Requests without a seat, in the order in which they may have one."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from services.scheduler.core.request import Request


class Policy(Protocol):
    """Who goes first."""

    name: str

    def key(self, request: Request) -> tuple[int, ...]:
        """Smaller goes first. Unique, and constant while the request waits."""
        ...


class Fcfs:
    """First come, first served: a preempted or requeued request keeps its place."""

    name = "fcfs"

    def key(self, request: Request) -> tuple[int, ...]:
        return (request.arrival,)


class WaitingQueue:
    """Waiting requests, sorted by the policy's key."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=self.policy.key)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, self.policy.key(request), key=self.policy.key)
        assert self._requests[index] is request, f"request {request.request_id} does not wait"
        del self._requests[index]
