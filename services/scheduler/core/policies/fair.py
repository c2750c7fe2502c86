"""Tenants share the pool by tokens: a virtual token counter per tenant (Sheng et al., Fairness in Serving Large
Language Models, OSDI 2024). The waiting tenant that was served least goes next.

A tenant's counter rises by the prompt tokens that are computed for it, when a request is first admitted, and by its
output tokens, when they are committed (of a beam search: by those of all beams), divided by its weight. What the
scheduler itself causes (recomputing after a preemption or a worker's death) is not charged. A tenant that comes to
wait is lifted to the least of those that wait: it has its share from now on, and no credit for the time when it wanted
nothing.

Decode rows are not walked. Of rows that yield one token per step, the tokens up to step `answered` are

    sum over rows of (answered + 1 - first)  =  num_rows * (answered + 1) - sum_first

so two numbers per tenant and lane are kept, which change when a row starts or leaves. A row that is planned two steps
ahead of its first result counts as -1 until then.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.policies.base import ClassKey, Policy, PolicyName, PolicyState
from services.scheduler.core.request import Request
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.scheduler.core.lane import Lane
    from services.scheduler.core.seats import Seat

MIN_REMEMBERED = 1024
"""Tenants whose counters are kept without asking whether they are still needed."""


def parse_weights(text: str) -> dict[str, float]:
    """`a=2,b=0.5`: weights of tenants; those not named have 1.

    Raises:
        ConfigError: something else.
    """
    weights: dict[str, float] = {}
    for part in text.split(",") if text else ():
        tenant, equals, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not (equals and 0 < weight < math.inf) or tenant.strip() in weights:
            raise ConfigError(f"tenant_weights: {part!r} is not a tenant and its weight, as in a=2,b=1")
        weights[tenant.strip()] = weight
    return weights


@dataclass(slots=True)
class _Rows:
    """Decode rows of one tenant on one lane."""

    num_rows: int = 0
    sum_first: int = 0


class Fair(Policy):
    """One class per tenant."""

    name = PolicyName.FAIR

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._counters: dict[str, float] = {}
        """Weighted tokens, without the present rows."""
        self._rows: dict[Lane, dict[str, _Rows]] = {}
        self._num_live: dict[str, int] = {}
        self._last = ""
        """The tenant that was admitted last: with nobody waiting, newcomers are lifted to it."""
        self._limit = MIN_REMEMBERED

    def counter(self, tenant: str) -> float:
        """Tokens served to the tenant over its weight, and what it was lifted by."""
        num_tokens = 0
        for lane, tenants in self._rows.items():
            rows = tenants.get(tenant)
            if rows is not None:
                num_tokens += rows.num_rows * (lane.answered + 1) - rows.sum_first
        return self._counters.get(tenant, 0.0) + num_tokens / self._weight(tenant)

    def class_of(self, request: Request) -> ClassKey:
        return request.submission.tenant

    def rank(self, oldest: Request, num_tokens_ahead: int) -> float:
        tenant = oldest.submission.tenant
        return self.counter(tenant) + num_tokens_ahead / self._weight(tenant)

    def precedence(self, request: Request) -> tuple[float, int]:
        return self.counter(request.submission.tenant), request.arrival

    # ------------------------------------------------------------ what happens

    def on_backlog(self, class_key: ClassKey, others: Iterable[ClassKey]) -> None:
        tenant = str(class_key)
        level = min((self.counter(str(other)) for other in others), default=self.counter(self._last))
        self._charge(tenant, max(0.0, level - self.counter(tenant)))
        if len(self._counters) > self._limit:
            self._forget(level)

    def on_admitted(self, request: Request, num_tokens: int) -> None:
        self._last = request.submission.tenant
        self._charge(self._last, num_tokens / self._weight(self._last))

    def on_decoding(self, seat: "Seat") -> None:
        tenants = self._rows.setdefault(seat.lane, {})
        rows = tenants.setdefault(seat.request.submission.tenant, _Rows())
        rows.num_rows += 1
        rows.sum_first += seat.first

    def on_left(self, seat: "Seat", num_yielded: int) -> None:
        tenant = seat.request.submission.tenant
        tenants = self._rows[seat.lane]
        rows = tenants[tenant]
        rows.num_rows -= 1
        rows.sum_first -= seat.first
        self._charge(tenant, num_yielded / self._weight(tenant))
        if not rows.num_rows:
            del tenants[tenant]
            if not tenants:
                del self._rows[seat.lane]

    def on_searched(self, request: Request, num_tokens: int) -> None:
        tenant = request.submission.tenant
        self._charge(tenant, num_tokens / self._weight(tenant))

    def on_live(self, request: Request) -> None:
        tenant = request.submission.tenant
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1

    def on_ended(self, request: Request) -> None:
        tenant = request.submission.tenant
        self._num_live[tenant] -= 1
        if not self._num_live[tenant]:
            del self._num_live[tenant]

    # ------------------------------------------------------------ what it remembers

    def save(self) -> PolicyState:
        return PolicyState(list(self._counters.items()), self._last, self._limit)

    def load(self, state: PolicyState) -> None:
        self._counters, self._last, self._limit = dict(state.counters), state.last, state.limit

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _charge(self, tenant: str, amount: float) -> None:
        self._counters[tenant] = self._counters.get(tenant, 0.0) + amount

    def _forget(self, level: float) -> None:
        """Drop the counters of tenants without requests that would be lifted anyway."""
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > level or tenant in self._num_live or tenant == self._last
        }
        self._limit = max(MIN_REMEMBERED, 2 * len(self._counters))
