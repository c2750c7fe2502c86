"""A worker without a model: carries out plans as infra/protocol.md has them, says what the trace says, counts its work.

Its clock is the number of steps: a decode row gets one token in every step, so what a step adds to the contexts of all
rows is known without looking at any of them.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.simulator.latency import LatencyModel, StepLoad
from shared.messages import BlockCopies, CopyKind, EndReason, NewRow, StepPlan, StepResult
from shared.packing import NO_TOKEN, pack_int32, unpack_int32

RATES_EVERY = 64


@dataclass(slots=True)
class Row:
    """One request in the batch."""

    request_id: str
    output: "array[int]"
    """All that it will say."""
    limit: int
    """`max_tokens`."""
    index: int
    """Output index of its next token."""
    known: int
    """Tokens that it came with."""
    computed: int
    num_blocks: int = 0
    first_step: int = 0
    """The step in which it yielded first; 0: in prefill."""


@dataclass(slots=True)
class StepReport:
    """One step as its readers see it."""

    result: StepResult
    load: StepLoad
    joined: list[str] = field(default_factory=list)
    """Requests that yield for the first time since they were added."""
    ended: list[str] = field(default_factory=list)
    num_continuing: int = 0
    """Rows that yield a token and did so in the step before."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A row that a plan added."""

    request_id: str
    num_known: int
    num_computed: int


class SimulatedWorker:
    """One incarnation. `outputs`: per request what it will say and its `max_tokens`."""

    def __init__(
        self, name: str, incarnation: int, outputs: Mapping[str, tuple["array[int]", int]], latency: LatencyModel
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.rows: dict[int, Row] = {}
        self.num_steps = 0
        self.held_tokens = 0
        """Tokens of all rows, known or sampled: what their blocks are for."""
        self.table_blocks = 0
        """Blocks in all block tables, shared ones as often as they are in one."""
        self.copied = dict.fromkeys(CopyKind, 0)
        """Blocks copied so far."""
        self._outputs, self._latency = outputs, latency
        self._decoding: dict[int, Row] = {}
        self._context = 0
        """Tokens of all decode rows."""
        self._left: list[int] = []
        self._sampling: list[int] = []
        self._load = StepLoad()
        self._plan_id = 0

    def begin(self, plan: StepPlan) -> tuple[StepLoad, list[str], list[Admission]]:
        """Take one plan; its work, the requests whose rows it drops after they yielded, and the rows it adds."""
        self._plan_id = plan.plan_id
        self._left, gone = [], []
        for number in plan.dropped:
            row = self.rows.get(number)
            if row is not None:
                if row.first_step:
                    self._left.append(number)
                    gone.append(row.request_id)
                self._remove(number)
        admitted = [self._add(new) for new in plan.added]
        pairs = unpack_int32(plan.blocks)
        for number in pairs[::2]:
            row = self.rows.get(number)
            if row is not None:
                row.num_blocks += 1
                self.table_blocks += 1
        load = StepLoad(decode_rows=len(self._decoding), context_tokens=self._context)
        load.copied_blocks = sum(self._copy(copies) for copies in plan.copies)
        self._sampling = list(self._decoding)
        for number, num_scheduled in plan.chunks:
            self._compute(number, num_scheduled, load)
        self._load = load
        return load, gone, admitted

    def _add(self, new: NewRow) -> Admission:
        output, limit = self._outputs[new.request_id]
        known, computed = len(new.tokens) // 4, new.num_computed_tokens
        self.rows[new.row] = Row(new.request_id, output, limit, known - new.num_prompt_tokens, known, computed)
        self.held_tokens += known
        return Admission(new.request_id, known, computed)

    def _copy(self, copies: BlockCopies) -> int:
        num_blocks = len(copies.pairs) // 8
        self.copied[copies.kind] += num_blocks
        return num_blocks

    def _compute(self, number: int, num_scheduled: int, load: StepLoad) -> None:
        row = self.rows.get(number)
        if row is None:
            return
        load.prefill_tokens += num_scheduled
        load.context_tokens += num_scheduled * row.computed + num_scheduled * (num_scheduled + 1) // 2
        row.computed += num_scheduled
        if row.computed == row.known:
            self._sampling.append(number)

    def finish(self) -> StepReport:
        """The end of the step that `begin` took."""
        self.num_steps += 1
        numbers, rows = self._sampling, self.rows
        tokens = array("i", [NO_TOKEN]) * (max(numbers, default=-1) + 1)
        joined: list[tuple[int, str, int]] = []
        ended: list[tuple[int, int]] = []
        for number in numbers:
            row = rows[number]
            index = row.index
            tokens[number] = row.output[index]
            row.index = index = index + 1
            if index == len(row.output):
                ended.append((number, EndReason.LENGTH if index >= row.limit else EndReason.EOS))
        num_continuing = len(self._decoding)
        for number in numbers[num_continuing:]:
            row = rows[number]
            joined.append((number, row.request_id, row.index - 1))
            row.first_step = self.num_steps
            self._decoding[number] = row
            self._context += row.known
        self._context += len(numbers)
        self.held_tokens += len(numbers)
        ended.sort()
        report = StepReport(
            StepResult(
                worker=self.name,
                incarnation=self.incarnation,
                step_id=self._plan_id,
                tokens=pack_int32(tokens),
                joined=tuple(joined),
                left=tuple(self._left),
                ended=tuple(ended),
                rates=self._latency.rates if self._plan_id % RATES_EVERY == 1 else (),
            ),
            self._load,
            [request_id for _, request_id, _ in joined],
            [rows[number].request_id for number, _ in ended],
            num_continuing,
        )
        for number, _ in ended:
            self._remove(number)
        return report

    def yielding(self) -> list[str]:
        """Requests whose rows have yielded."""
        return [row.request_id for row in self._decoding.values()]

    def _remove(self, number: int) -> None:
        row = self.rows.pop(number)
        length = row.known
        if row.first_step:
            del self._decoding[number]
            length += self.num_steps - row.first_step + 1
            self._context -= length
        self.held_tokens -= length
        self.table_blocks -= row.num_blocks
