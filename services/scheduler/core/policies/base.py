"""What a policy is asked and told.

Waiting requests fall into classes. Within a class the order never depends on the policy: first those that ran already
(preempted, or their worker died), then fresh ones, both by arrival. The policy only ranks the classes. So ranks may
change while requests wait, at the cost of the classes and not of the requests.
"""
# ruff: noqa: B027  (most policies need not be told most things)

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.request import Request

if TYPE_CHECKING:
    from services.scheduler.core.seats import Seat

ClassKey = int | str


class PolicyName(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


class PolicyState(msgspec.Struct, frozen=True, array_like=True):
    """What a policy remembers that does not follow from the live requests; part of the snapshot."""

    counters: list[tuple[str, float]] = []
    last: str = ""
    limit: int = 0


class Policy(ABC):
    """Ranks classes of waiting requests and running requests. What it is told defaults to being of no interest."""

    name: PolicyName

    @abstractmethod
    def class_of(self, request: Request) -> ClassKey:
        """The request's class; constant."""

    @abstractmethod
    def rank(self, oldest: Request, num_tokens_ahead: int) -> float:
        """Of the class whose oldest waiting request is `oldest`; the smallest goes next, of equal ones the older.

        `num_tokens_ahead` prompt tokens of this class are to be admitted before it.
        """

    @abstractmethod
    def precedence(self, request: Request) -> tuple[float, int]:
        """Of a running request: the smaller computes its prompt first, the largest is preempted first. Unique."""

    def on_backlog(self, class_key: ClassKey, others: Iterable[ClassKey]) -> None:
        """A fresh request comes to wait in a class in which none waits; `others` are those in which some do."""

    def on_admitted(self, request: Request, num_tokens: int) -> None:
        """A request runs for the first time; `num_tokens` of its prompt are to be computed."""

    @property
    def has_claims(self) -> bool:
        """Whether some waiting request may claim a seat."""
        return False

    @property
    def has_donors(self) -> bool:
        """Whether some running request may have to make way."""
        return False

    def claims_seat(self, request: Request) -> bool:
        """Whether the next request in order need not wait until a seat or the budget of a pass becomes free."""
        return False

    def yields_to(self, seat: "Seat", request: Request, num_leaving: int) -> bool:
        """Whether a running request may be preempted for one that claims a seat; `num_leaving` of its class are."""
        return False

    def on_seated(self, seat: "Seat") -> None:
        """A request has a seat, or was restored to it."""

    def on_decoding(self, seat: "Seat") -> None:
        """From plan `seat.first` on the seat yields a token per step."""

    def on_left(self, seat: "Seat", num_yielded: int) -> None:
        """A seat is left; it has yielded that many committed tokens."""

    def on_searched(self, request: Request, num_tokens: int) -> None:
        """A beam search has computed that many sequences' next tokens."""

    def on_live(self, request: Request) -> None:
        """A request has come, or was restored."""

    def on_ended(self, request: Request) -> None:
        """A request has ended."""

    def save(self) -> PolicyState:
        """For the snapshot."""
        return PolicyState()

    def load(self, state: PolicyState) -> None:
        """Go on with what `save` gave. Live requests and seats have been told of."""
