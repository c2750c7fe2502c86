"""Smaller numbers are sooner, and waiting makes every number smaller.

A request that came `ageing_s` seconds earlier goes before one whose priority is better by 1. That is a constant key:

    rank = arrived_at + priority * ageing_s

So nothing starves: of priority p, a request waits for those that were there before it and for those of a better
priority q that come within (p - q) * ageing_s seconds.
"""

from services.scheduler.core.policies.base import ClassKey, Policy, PolicyName
from services.scheduler.core.request import Request


class Priority(Policy):
    """One class per priority, as old as its oldest request."""

    name = PolicyName.PRIORITY

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def class_of(self, request: Request) -> ClassKey:
        return request.submission.priority

    def rank(self, oldest: Request, num_tokens_ahead: int) -> float:
        return oldest.arrived_at + oldest.submission.priority * self._ageing_s

    def precedence(self, request: Request) -> tuple[float, int]:
        return request.arrived_at + request.submission.priority * self._ageing_s, request.arrival
