"""The decode rows of one lane. They are not walked: the clock is the plan id, and rows lie where it will meet them.

A seat that becomes a decode row in plan `first` yields one token in every plan from then on:

    tokens known before plan k     known + (k - first)
    output index of its token in k known - num_prompt_tokens + (k - first)
    needs a new block in plan k    when (known + k - first - 1) % block_size == 0
    ends by length in plan         last = first + max_tokens - output index in `first` - 1

So a step in which nothing starts, ends or crosses a block boundary touches no seat at all: phases hold the decode rows
by k % block_size of their next boundary, the calendar by their last plan.

    plan      … first …              answered │ in flight │ planned   …   last
    tokens      └─ output ─┘└─ history ──────┘└─ predicted ─────────────────┘
"""

from collections.abc import Iterator, Mapping

from services.scheduler.core.seats import Seat


class DecodeClock:
    """Seats with `first` and `last`, from their start until they leave or their last token is answered."""

    def __init__(self, block_size: int) -> None:
        self.planned = 0
        """The last plan that was made."""
        self.num_rows = 0
        """Decode rows of the next one."""
        self._block_size = block_size
        self._phases: list[dict[int, Seat]] = [{} for _ in range(block_size)]
        self._calendar: dict[int, dict[int, Seat]] = {}

    def boundary(self) -> Mapping[int, Seat]:
        """By row: those that need a block in the next plan."""
        return self._phases[(self.planned + 1) % self._block_size]

    def due(self, plan_id: int) -> Mapping[int, Seat]:
        """By row: those whose last token, by length, is that of this plan."""
        return self._calendar.get(plan_id, {})

    def add(self, seat: Seat) -> None:
        """The seat decodes, or has decoded and its last token is not answered."""
        self._calendar.setdefault(seat.last, {})[seat.row] = seat
        if seat.last > self.planned:
            self.num_rows += 1
            self._phase(seat)[seat.row] = seat

    def remove(self, seat: Seat) -> None:
        """The seat decodes no longer, if it does."""
        day = self._calendar.get(seat.last, {})
        if day.get(seat.row) is seat:
            del day[seat.row]
            if not day:
                del self._calendar[seat.last]
            if seat.last > self.planned:
                self._stop(seat)

    def advance(self) -> None:
        """The next plan is made: for some it is the last one."""
        self.planned += 1
        for seat in self.due(self.planned).values():
            self._stop(seat)

    def _stop(self, seat: Seat) -> None:
        self.num_rows -= 1
        del self._phase(seat)[seat.row]

    def _phase(self, seat: Seat) -> dict[int, Seat]:
        return self._phases[(seat.first + 1 - seat.known) % self._block_size]

    # ------------------------------------------------------------ for checks

    def phases(self) -> list[list[Seat]]:
        """Decode rows of the next plan, by the plan in which they need a block, modulo the block size."""
        return [list(phase.values()) for phase in self._phases]

    def days(self) -> Iterator[tuple[int, int]]:
        """(last plan, row) of all seats."""
        return ((day, row) for day, rows in self._calendar.items() for row in rows)
