"""Requests without a seat, in the order in which they may have one."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from operator import attrgetter

from services.scheduler.core.policies.base import ClassKey, Policy
from services.scheduler.core.request import Request

_arrival = attrgetter("arrival")


@dataclass(slots=True)
class _Class:
    """Waiting requests of one class, each list by arrival."""

    begun: list[Request] = field(default_factory=list)
    """They ran already, and go first."""
    fresh: list[Request] = field(default_factory=list)

    def oldest(self) -> Request:
        """Of all; a class is not empty."""
        if self.begun and self.fresh:
            return min(self.begun[0], self.fresh[0], key=_arrival)
        return (self.begun or self.fresh)[0]

    def of(self, request: Request) -> list[Request]:
        return self.begun if request.has_begun else self.fresh


class _Walk:
    """A way through one class, for comparing it with the others."""

    __slots__ = ("_begun", "_fresh", "_requests", "num_tokens_ahead")

    def __init__(self, requests: _Class) -> None:
        self._requests = requests
        self._begun = 0
        self._fresh = 0
        self.num_tokens_ahead = 0

    def oldest(self) -> Request | None:
        """Of what is left."""
        begun, fresh = self._requests.begun, self._requests.fresh
        heads = [*begun[self._begun : self._begun + 1], *fresh[self._fresh : self._fresh + 1]]
        return min(heads, key=_arrival, default=None)

    def take(self) -> Request:
        """The next one."""
        if self._begun < len(self._requests.begun):
            self._begun += 1
            return self._requests.begun[self._begun - 1]
        request = self._requests.fresh[self._fresh]
        self._fresh += 1
        self.num_tokens_ahead += request.num_prompt_tokens
        return request


class WaitingQueue:
    """Waiting requests by class; the policy ranks the classes whenever the queue is walked."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._classes: dict[ClassKey, _Class] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """In order, as if each were admitted in turn. The queue must not change meanwhile."""
        if len(self._classes) < 2:
            for requests in self._classes.values():
                yield from requests.begun
                yield from requests.fresh
            return
        heap: list[tuple[float, int, _Class | _Walk]] = [self._entry(requests) for requests in self._classes.values()]
        heapify(heap)
        while heap:
            walk = heap[0][2]
            if isinstance(walk, _Class):
                walk = _Walk(walk)
            yield walk.take()
            oldest = walk.oldest()
            if oldest is None:
                heappop(heap)
            else:
                heapreplace(heap, (self.policy.rank(oldest, walk.num_tokens_ahead), oldest.arrival, walk))

    def oldest(self) -> Request | None:
        """The one that arrived first."""
        heads = (requests[0] for c in self._classes.values() for requests in (c.begun, c.fresh) if requests)
        return min(heads, key=_arrival, default=None)

    def begun(self) -> Iterator[Request]:
        """Those that ran before, class by class. The queue must not change meanwhile."""
        for requests in self._classes.values():
            yield from requests.begun

    def first(self) -> Request | None:
        """The next one in order. O(classes)."""
        if not self._classes:
            return None
        requests = min(map(self._entry, self._classes.values()))[2]
        return (requests.begun or requests.fresh)[0]

    def _entry(self, requests: _Class) -> "tuple[float, int, _Class]":
        oldest = requests.oldest()
        return self.policy.rank(oldest, 0), oldest.arrival, requests

    def push(self, request: Request) -> None:
        """A request waits (again)."""
        class_key = self.policy.class_of(request)
        requests = self._classes.get(class_key)
        if requests is None:
            if not request.has_begun:
                self.policy.on_backlog(class_key, self._classes)
            requests = self._classes[class_key] = _Class()
        insort(requests.of(request), request, key=_arrival)
        self._size += 1

    def remove(self, request: Request) -> None:
        """A request that waits does not wait any more."""
        class_key = self.policy.class_of(request)
        requests = self._classes[class_key]
        waiting = requests.of(request)
        index = bisect_left(waiting, request.arrival, key=_arrival)
        assert waiting[index] is request, f"request {request.request_id} does not wait"
        del waiting[index]
        self._size -= 1
        if not (requests.begun or requests.fresh):
            del self._classes[class_key]

    def check_integrity(self) -> None:
        """Raises AssertionError if a class is empty, or a request stands where it does not belong."""
        for class_key, requests in self._classes.items():
            assert requests.begun or requests.fresh, "an empty class"
            for waiting in (requests.begun, requests.fresh):
                assert waiting == sorted(waiting, key=_arrival)
                assert all(self.policy.class_of(request) == class_key for request in waiting)
                assert all(requests.of(request) is waiting for request in waiting)
        assert self._size == sum(len(c.begun) + len(c.fresh) for c in self._classes.values())
