"""Which worker takes a waiting request: where the least lies before its end of prefill, by load and by residency.

    cost of a lane = ROW_WEIGHT * rows in use + tokens in prefill + tokens of the request that are not cached there

So a cached prefix draws requests to its lane until that lane is ahead by as much work as the prefix would take again;
then the next one goes elsewhere, computes the prefix there, and from then on both lanes have it. (Affinity alone makes
the worker with the popular prompt a hot spot. Preble, arXiv:2407.00023, weighs the two in the same currency.) What is
cached is read from the lanes' own caches at the moment of the decision: an evicted block draws nobody.

Placing is a trial that changes nothing. One plan concerns one worker, so requests placed on the others only reserve
room there, and wait for those workers' next plans.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.forks import extent_of
from services.scheduler.core.lane import Lane
from services.scheduler.core.prefix_cache import CachedBlock
from services.scheduler.core.request import Request
from services.scheduler.core.residency import first_key
from services.scheduler.core.seats import Seat
from services.scheduler.core.suspects import on_trial

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
    kept_for: str
    """`swapped`: for requests that were swapped out, which come first, as long as they have their copies. `suspect`:
    for one that is on trial. Empty: for nobody."""

    def lacks(self, num_blocks: int, config: SchedulerConfig, *, num_rows: int = 1) -> str:
        """What keeps a request that needs so much off this lane; empty if nothing does."""
        if self.kept_for:
            return self.kept_for
        if self.num_rows_free < num_rows:
            return "rows"
        return "blocks" if num_blocks > self.room(config) else ""

    def room(self, config: SchedulerConfig) -> int:
        """Blocks that an admission may take."""
        return self.num_blocks_free - config.room(self.num_seated)

    @property
    def order(self) -> tuple[int, int]:
        """Among equal costs."""
        return len(self.lane.in_flight), self.lane.index

    def take(self, num_blocks: int, num_tokens: int, *, num_rows: int = 1) -> None:
        self.load += ROW_WEIGHT * num_rows + num_tokens
        self.num_rows_free -= num_rows
        self.num_seated += num_rows
        self.num_blocks_free -= num_blocks


class Need(NamedTuple):
    """What a request takes on one lane."""

    num_blocks: int
    num_tokens: int
    """Known tokens that would have to be computed there."""
    hits: list[CachedBlock]


class Rank(NamedTuple):
    """Smaller takes the next request."""

    cost: int
    num_in_flight: int
    lane_index: int


def blocks_to_admit(request: Request, config: SchedulerConfig) -> int:
    """Blocks for all known tokens and for the first one that decode adds, of every beam if it searches."""
    num_blocks = config.blocks_for(min(request.num_tokens + 1, request.max_total_tokens))
    num_shared = request.num_prompt_tokens // config.block_size
    return num_blocks + (request.num_rows - 1) * (num_blocks - num_shared)


class Placement:
    """One trial over all lanes that may take requests.

    Draining lanes take none. If every lane is draining, they take back what ran before and was preempted: it may end
    there, as there is no other place. `without_copies` names a lane whose swapped requests would give theirs up.
    """

    def __init__(self, lanes: Iterable[Lane], config: SchedulerConfig, *, without_copies: Lane | None = None) -> None:
        self._config = config
        sound = [lane for lane in lanes if not lane.broken]
        self.all_leave = all(lane.draining for lane in sound)
        self._trials = {
            lane.index: _trial(lane, _kept_for(lane, without_copies))
            for lane in sound
            if self.all_leave or not lane.draining
        }
        with_rows = [trial for trial in self._trials.values() if trial.num_rows_free]
        self._open = [(trial.lane.pool.cache.keys, trial) for trial in with_rows]
        # Least loaded first. Loads only rise in a trial, so what is out of date comes up too early, never too late.
        self._by_load = [Rank(trial.load, *trial.order) for trial in with_rows]
        heapify(self._by_load)
        self._most_room = max((trial.room(config) for trial in with_rows), default=0)
        """No lane takes a request that needs more blocks; it need not be asked."""
        self._largest = max((trial.lane.pool.num_blocks for trial in self._trials.values()), default=0)
        self._needs_of: Request | None = None
        self._needs: dict[int, Need] = {}
        """By lane, of those with hits."""
        self._without_hits = Need(0, 0, [])
        self._key: bytes | None = None
        """Of the request's first block, if that can be a hit."""

    def concerns(self, lane: Lane) -> bool:
        """Whether the lane takes requests."""
        return lane.index in self._trials

    def has_row(self, lane: Lane) -> bool:
        return self._trials[lane.index].num_rows_free > 0

    @property
    def has_rows(self) -> bool:
        """Whether some lane has a row left."""
        return any(trial.num_rows_free for trial in self._trials.values())

    def fits_some_lane(self, request: Request) -> bool:
        """Whether one of the lanes would take the request if it were empty."""
        if (self.all_leave and not request.has_begun) or request.num_rows > self._config.max_rows:
            return False
        return self._largest >= request.most_blocks(self._config.block_size)

    def place(self, request: Request, preferred: Lane | None = None) -> Lane | None:
        """The lane that takes the request, now with less room; `preferred` goes before cheaper ones."""
        chosen = self._trials[preferred.index] if preferred is not None else None
        if chosen is None or not self._takes(chosen, request):
            chosen = self._cheapest(request)
        if chosen is None:
            return None
        need = self._need(chosen.lane, request)
        chosen.take(need.num_blocks, need.num_tokens, num_rows=request.num_rows)
        return chosen.lane

    def reserve_fork(self, lane: Lane, request: Request) -> bool:
        """Whether the lane takes the request as a fork of a row there; then it has less room."""
        trial = self._trials.get(lane.index)
        if trial is None:
            return False
        num_shared = extent_of(request, self._config.block_size).num_shared
        num_blocks = blocks_to_admit(request, self._config) - num_shared
        if trial.lacks(num_blocks, self._config):
            return False
        trial.take(num_blocks, num_tokens=1)
        return True

    def _cheapest(self, request: Request) -> Trial | None:
        self._turn_to(request)
        best = self._least_loaded(request)
        best_rank = None if best is None else Rank(best.load + request.num_tokens, *best.order)
        for trial in self._with_hits():
            # At least one token is left to compute, so a lane with as much load as the best one's cost is no match.
            if not trial.num_rows_free or (best_rank is not None and trial.load >= best_rank.cost):
                continue
            rank = Rank(trial.load + self._need(trial.lane, request).num_tokens, *trial.order)
            if (best_rank is None or rank < best_rank) and self._takes(trial, request):
                best, best_rank = trial, rank
        return best

    def _least_loaded(self, request: Request) -> Trial | None:
        """The cheapest lane if nothing of the request were cached anywhere: then the least loaded one that takes it."""
        num_blocks = self._without_hits.num_blocks
        if num_blocks > self._most_room:
            return None
        heap, unfit, found = self._by_load, [], None
        while heap and found is None:
            trial = self._trials[heap[0].lane_index]
            if not trial.num_rows_free:
                heappop(heap)
            elif heap[0].cost != trial.load:  # it took requests since
                heapreplace(heap, Rank(trial.load, *trial.order))
            elif trial.lane.holds(request) and not trial.lacks(num_blocks, self._config, num_rows=request.num_rows):
                found = trial
            else:
                unfit.append(heappop(heap))
        for rank in unfit:
            heappush(heap, rank)
        return found

    def _with_hits(self) -> list[Trial]:
        """Lanes on which the request would begin with a cached block."""
        key = self._key
        return [] if key is None else [trial for keys, trial in self._open if key in keys]

    def hits(self, request: Request, lane: Lane) -> list[CachedBlock]:
        """Cached blocks with which the request would begin on the lane."""
        return self._need(lane, request).hits

    def _takes(self, trial: Trial, request: Request) -> bool:
        if not (trial.num_rows_free and trial.lane.holds(request)):
            return False
        return not self._lack(trial, request)

    def _lack(self, trial: Trial, request: Request) -> str:
        return trial.lacks(self._need(trial.lane, request).num_blocks, self._config, num_rows=request.num_rows)

    def _need(self, lane: Lane, request: Request) -> Need:
        """What the request takes on the lane. Shared blocks cost nothing; cached ones that nobody uses cost a block."""
        self._turn_to(request)
        if self._key is None or self._key not in lane.pool.cache.keys:
            return self._without_hits
        need = self._needs.get(lane.index)
        if need is None:
            hits = lane.match(request)
            # Behind a block that may be evicted until the admission nothing is sure.
            num_blocks = self._without_hits.num_blocks - lane.pool.num_shared(hits)
            num_tokens = request.num_tokens - len(hits) * self._config.block_size
            need = self._needs[lane.index] = Need(num_blocks, num_tokens, hits)
        return need

    def _turn_to(self, request: Request) -> None:
        """Note what is asked of all lanes alike."""
        if self._needs_of is not request:
            self._needs_of = request
            self._needs.clear()
            self._key = first_key(request, self._config.block_size) if self._config.enable_prefix_caching else None
            self._without_hits = Need(blocks_to_admit(request, self._config), request.num_tokens, [])

    def lacks_without(self, request: Request, lane: Lane, seats: Sequence[Seat]) -> str:
        """What would keep the request off the lane if these seats were left; empty if nothing would."""
        trial = self._trials[lane.index]
        freed = sum(lane.pool.references(block) == 1 for seat in seats for block in seat.blocks)
        without = Trial(
            lane=lane,
            load=0,
            num_rows_free=trial.num_rows_free + len(seats),
            num_seated=trial.num_seated - len(seats),
            num_blocks_free=trial.num_blocks_free + freed,
            kept_for=trial.kept_for,
        )
        return self._lack(without, request)

    def obstacles(self, request: Request) -> list[tuple[Lane, str]]:
        """(lane, what it lacks) for lanes that would fit the request if they were empty."""
        return [
            (trial.lane, self._lack(trial, request)) for trial in self._trials.values() if trial.lane.holds(request)
        ]


def _kept_for(lane: Lane, without_copies: Lane | None) -> str:
    if on_trial(lane) is not None:
        return "suspect"
    return "swapped" if lane.swapped and lane is not without_copies else ""


def _trial(lane: Lane, kept_for: str) -> Trial:
    num_rows = lane.num_rows
    return Trial(
        lane=lane,
        load=ROW_WEIGHT * num_rows + lane.num_prefill_tokens,
        num_rows_free=len(lane.free_rows),
        num_seated=num_rows,
        num_blocks_free=lane.pool.num_available,
        kept_for=kept_for,
    )
