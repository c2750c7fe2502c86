"""Tenants share the pool by tokens: a virtual token counter per tenant (Sheng et al., Fairness in Serving Large
Language Models, OSDI 2024). The waiting tenant that was served least goes next.

A tenant's counter rises by the prompt tokens that are computed for it, when a request is first admitted, and by its
output tokens, when they are committed (of a beam search: by those of all beams), divided by its weight. What the
scheduler itself causes (recomputing after a preemption or a worker's death) is not charged. A tenant that comes to
wait is lifted to the least of those that wait: it has its share from now on, and no credit for the time when it wanted
nothing.

The counters order only what waits, so a tenant that wants little would wait for as long as others' requests run. Hence
a second rule, max-min fairness of seats: if all that the next tenant in order wants is no more than its share of the
seats, or if it has none, its request enters before the running prompts go on, and takes the seat of a tenant that has
more than its share if none is free. Tenants that both want more than their shares never displace each other.

Decode rows are not walked. Of rows that yield one token per step, the tokens up to step `answered` are

    sum over rows of (answered + 1 - first)  =  num_rows * (answered + 1) - sum_first

so two numbers per tenant and lane are kept, which change when a row starts or leaves. A row that is planned two steps
ahead of its first result counts as -1 until then.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
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


def _add(counts: dict[str, int], tenant: str, number: int) -> None:
    """Count; who is at 0 is not in the dictionary."""
    counts[tenant] = counts.get(tenant, 0) + number
    if not counts[tenant]:
        del counts[tenant]


class Fair(Policy):
    """One class per tenant."""

    name = PolicyName.FAIR

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._counters: dict[str, float] = {}
        """Weighted tokens, without the present rows."""
        self._rows: dict[Lane, dict[str, _Rows]] = {}
        self._num_live: dict[str, int] = {}
        self._num_seated: dict[str, int] = {}
        self._total_seated = 0
        self._seats_changed = True
        self._some_claim = self._some_give = False
        self._total_weight = Fraction(0)
        """Of the tenants in `_num_live`; exact, so it does not depend on the order in which they came."""
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
        tenant = request.submission.tenant
        return -1.0 if self._wants_little(tenant) else self.counter(tenant), request.arrival

    # ------------------------------------------------------------ seats

    @property
    def has_claims(self) -> bool:
        self._look_at_seats()
        return self._some_claim

    @property
    def has_donors(self) -> bool:
        self._look_at_seats()
        return self._some_give

    def _look_at_seats(self) -> None:
        """O(tenants), but only after somebody came, went, sat down or got up: not in steady decode."""
        if self._seats_changed:
            live, seated = self._num_live.items(), self._num_seated
            self._some_claim = any(num > seated.get(tenant, 0) and self._may_claim(tenant) for tenant, num in live)
            self._some_give = any(num > max(1.0, self._share(tenant)) for tenant, num in seated.items())
            self._seats_changed = False

    def claims_seat(self, request: Request) -> bool:
        return self._may_claim(request.submission.tenant)

    def _may_claim(self, tenant: str) -> bool:
        return tenant not in self._num_seated or self._wants_little(tenant)

    def yields_to(self, seat: "Seat", request: Request, num_leaving: int) -> bool:
        tenant = seat.request.submission.tenant
        is_above = self._num_seated[tenant] - num_leaving > max(1.0, self._share(tenant))
        return is_above and self.counter(tenant) >= self.counter(request.submission.tenant)

    def _wants_little(self, tenant: str) -> bool:
        """Whether the requests of the tenant, running and waiting, are no more than its share of the seats."""
        return self._num_live[tenant] <= self._share(tenant)

    def _share(self, tenant: str) -> float:
        """The tenant's part of the seats that are taken, by its weight among the tenants that want any."""
        return self._total_seated * self._weight(tenant) / float(self._total_weight)

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

    def on_seated(self, seat: "Seat") -> None:
        _add(self._num_seated, seat.request.submission.tenant, 1)
        self._total_seated += 1
        self._seats_changed = True

    def on_decoding(self, seat: "Seat") -> None:
        tenants = self._rows.setdefault(seat.lane, {})
        rows = tenants.setdefault(seat.request.submission.tenant, _Rows())
        rows.num_rows += 1
        rows.sum_first += seat.first

    def on_left(self, seat: "Seat", num_yielded: int) -> None:
        tenant = seat.request.submission.tenant
        _add(self._num_seated, tenant, -1)
        self._total_seated -= 1
        self._seats_changed = True
        if not seat.first:
            return
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
        if tenant not in self._num_live:
            self._total_weight += Fraction(self._weight(tenant))
        _add(self._num_live, tenant, 1)
        self._seats_changed = True

    def on_ended(self, request: Request) -> None:
        tenant = request.submission.tenant
        _add(self._num_live, tenant, -1)
        self._seats_changed = True
        if tenant not in self._num_live:
            self._total_weight -= Fraction(self._weight(tenant))

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
