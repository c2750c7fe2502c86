"""First come, first served."""

from services.scheduler.core.policies.base import ClassKey, Policy, PolicyName
from services.scheduler.core.request import Request


class Fcfs(Policy):
    """One class."""

    name = PolicyName.FCFS

    def class_of(self, request: Request) -> ClassKey:
        return 0

    def rank(self, oldest: Request, num_tokens_ahead: int) -> float:
        return 0.0

    def precedence(self, request: Request) -> tuple[float, int]:
        return 0.0, request.arrival
