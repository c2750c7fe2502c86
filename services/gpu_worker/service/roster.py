"""Which requests are in the batch: what a crash report may say."""

from shared.messages import StepPlan, StepResult


class BatchRoster:
    """Row → request id of the persistent batch, from plans and results alone."""

    def __init__(self) -> None:
        self._rows: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def before(self, plan: StepPlan) -> None:
        """`plan` is about to run."""
        parents = {beam.parent: self._rows[beam.parent] for beam in plan.beams if beam.parent in self._rows}
        for row in plan.dropped:
            self._rows.pop(row, None)
        self._rows.update((new.row, new.request_id) for new in plan.added)
        self._rows.update({beam.row: parents[beam.parent] for beam in plan.beams if beam.parent in parents})

    def after(self, result: StepResult) -> None:
        """The plan ran and gave `result`."""
        for row, _ in result.ended:
            self._rows.pop(row, None)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """In row order."""
        return tuple(self._rows[row] for row in sorted(self._rows))
