"""Which worker takes a waiting request: the least loaded one that has a row and the blocks.

Placing is a trial that changes nothing. One plan concerns one worker, so requests placed on the others only reserve
room there, and wait for those workers' next plans.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.lane import Lane
from services.scheduler.core.request import Request

ROW_WEIGHT = 64
"""A row weighs as much as this many prefill tokens not yet computed: it stays for many steps, they do not."""


@dataclass(slots=True)
class Trial:
    """What a lane would have left."""

    lane: Lane
    load: int
    num_rows_free: int
    num_seated: int
    num_blocks_free: int

    def lacks(self, num_blocks: int, config: SchedulerConfig) -> str:
        """What keeps a request that needs `num_blocks` off this lane; empty if nothing does."""
        if not self.num_rows_free:
            return "rows"
        return "blocks" if self.num_blocks_free - num_blocks < config.room(self.num_seated) else ""

    def take(self, num_blocks: int, num_tokens: int) -> None:
        self.load += ROW_WEIGHT + num_tokens
        self.num_rows_free -= 1
        self.num_seated += 1
        self.num_blocks_free -= num_blocks


def blocks_to_admit(request: Request, config: SchedulerConfig) -> int:
    """Blocks for all known tokens and for the first one that decode adds."""
    return config.blocks_for(min(request.num_tokens + 1, request.max_total_tokens))


def can_ever_take(lane: Lane, request: Request) -> bool:
    return not lane.draining and lane.pool.num_blocks * lane.config.block_size >= request.max_total_tokens


class Placement:
    """One trial over all lanes that may take requests."""

    def __init__(self, lanes: Iterable[Lane], config: SchedulerConfig) -> None:
        self._config = config
        self._trials = [_trial(lane) for lane in lanes if not (lane.draining or lane.broken)]

    def has_row(self, lane: Lane) -> bool:
        return any(trial.num_rows_free > 0 for trial in self._trials if trial.lane is lane)

    def fits_some_lane(self, request: Request) -> bool:
        """Whether the request would fit one of the lanes if that were empty."""
        return any(can_ever_take(trial.lane, request) for trial in self._trials)

    def place(self, request: Request, preferred: Lane | None = None) -> Lane | None:
        """The lane that takes the request, now with less room; `preferred` goes before less loaded ones."""
        num_blocks = blocks_to_admit(request, self._config)
        fitting = [
            trial
            for trial in self._trials
            if can_ever_take(trial.lane, request) and not trial.lacks(num_blocks, self._config)
        ]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda trial: (trial.lane is not preferred, trial.load, *_tie(trial.lane)))
        chosen.take(num_blocks, request.num_tokens)
        return chosen.lane

    def obstacles(self, request: Request) -> list[tuple[Lane, str]]:
        """(lane, what it lacks) for lanes that would fit the request if they were empty."""
        num_blocks = blocks_to_admit(request, self._config)
        lanes = [trial for trial in self._trials if can_ever_take(trial.lane, request)]
        return [(trial.lane, trial.lacks(num_blocks, self._config)) for trial in lanes]


def _trial(lane: Lane) -> Trial:
    return Trial(
        lane=lane,
        load=ROW_WEIGHT * len(lane.seats) + lane.num_prefill_tokens,
        num_rows_free=len(lane.free_rows),
        num_seated=len(lane.seats),
        num_blocks_free=lane.pool.num_free,
    )


def _tie(lane: Lane) -> tuple[int, int]:
    return len(lane.in_flight), lane.index
