"""Where a worker's time goes, step by step: one histogram per part."""

from enum import StrEnum

from shared.histogram import STEP_TIME_BOUNDS_S, Histogram
from shared.messages import StepTimes


class Part(StrEnum):
    """A part of a worker's turn. All but `publish`, which runs beside the next step, are on the compute thread."""

    PLAN_WAIT = "plan_wait"
    """Rows in the batch and nothing to do: from the end of a step to the arrival of the next plan."""
    INPUT_BUILD = "input_build"
    """From the plan to the tensors of the forward pass; copies of blocks are counted by the scheduler's rates."""
    ATTENTION = "attention"
    GEMM = "gemm"
    """The forward pass without attention: products with weights, and the little that lies between them."""
    SAMPLING = "sampling"
    """From logits to tokens and endings."""
    STEP = "step"
    """The whole step, without the wait before it."""
    PUBLISH = "publish"
    """From the result to Redis' answer."""


class StepProfile:
    """Each part is observed by one thread; others may read it."""

    def __init__(self) -> None:
        self.parts = {part: Histogram(STEP_TIME_BOUNDS_S) for part in Part}

    def observe(self, part: Part, seconds: float) -> None:
        """One more step spent this in `part`."""
        self.parts[part].observe(seconds)

    def totals(self) -> dict[Part, float]:
        """Seconds of each part since the profile began."""
        return {part: times.total for part, times in self.parts.items()}

    def told(self) -> tuple[StepTimes, ...]:
        """For the worker's lease: parts that were never observed are left out."""
        return tuple(
            StepTimes(str(part), tuple(times.counts), times.total)
            for part, times in self.parts.items()
            if times.num_values
        )
