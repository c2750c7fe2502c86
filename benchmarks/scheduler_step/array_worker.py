"""A worker that costs nothing: it follows plans by the wire's rules and answers every row with the same token."""

from array import array
from collections import defaultdict
from dataclasses import dataclass

from shared.messages import EndReason, StepPlan, StepResult
from shared.packing import NO_TOKEN

TOKEN = 7


@dataclass(slots=True)
class _Row:
    request_id: str
    pending: int
    """Known tokens that no plan computed yet."""
    output_index: int
    """Of its next token."""
    max_tokens: int
    last: int = 0
    """The step of its last token; 0 while it is in prefill."""


class ArrayWorker:
    """One incarnation. A step costs it O(changes), so that what is measured is the scheduler."""

    def __init__(self, name: str, incarnation: int, num_rows: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.num_tokens = 0
        """Yielded by all of its steps."""
        self._tokens = array("i", [NO_TOKEN]) * num_rows
        self._rows: dict[int, _Row] = {}
        self.num_decoding = 0
        """Rows that yield a token in every step."""
        self._endings: dict[int, list[int]] = defaultdict(list)

    def step(self, plan: StepPlan) -> StepResult:
        """Carry `plan` out."""
        left = tuple(row for row in plan.dropped if self._drop(row))
        for new in plan.added:
            known = len(new.tokens) // 4
            output_index = known - new.num_prompt_tokens
            self._rows[new.row] = _Row(
                new.request_id, known - new.num_computed_tokens, output_index, new.params.max_tokens
            )
        joined = tuple(
            (row, self._rows[row].request_id, self._rows[row].output_index)
            for row, num_scheduled in plan.chunks
            if self._compute(row, num_scheduled, plan.plan_id)
        )
        ended = tuple((row, int(EndReason.LENGTH)) for row in sorted(self._endings.pop(plan.plan_id, ())))
        self.num_tokens += self.num_decoding
        result = StepResult(
            self.name, self.incarnation, plan.plan_id, self._tokens.tobytes(), joined=joined, left=left, ended=ended
        )
        for row, _ in ended:
            self._clear(row)
        return result

    def _compute(self, row: int, num_scheduled: int, plan_id: int) -> bool:
        """Whether the row's prefill is complete: it decodes from this step on."""
        state = self._rows[row]
        state.pending -= num_scheduled
        if state.pending:
            return False
        state.last = plan_id + state.max_tokens - state.output_index - 1
        self._endings[state.last].append(row)
        self._tokens[row] = TOKEN
        self.num_decoding += 1
        return True

    def _drop(self, row: int) -> bool:
        """Whether the row had joined."""
        state = self._rows.get(row)
        if state is None:
            return False  # it ended before the plan that drops it
        if not state.last:
            del self._rows[row]
            return False
        self._endings[state.last].remove(row)
        self._clear(row)
        return True

    def _clear(self, row: int) -> None:
        del self._rows[row]
        self._tokens[row] = NO_TOKEN
        self.num_decoding -= 1
