"""One worker incarnation: its rows, its plans in flight, its blocks. When decode rows yield, grow and end: see
`decode_clock.py`.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from services.scheduler.core import beam_rows, logprobs, residency, suspects
from services.scheduler.core.blocks import AllocStatus, BlockPool
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.contradiction import is_silent
from services.scheduler.core.cpu_tier import SwappedOut
from services.scheduler.core.decode_clock import DecodeClock
from services.scheduler.core.extents import NOWHERE
from services.scheduler.core.history import MAX_STEPS, TokenHistory
from services.scheduler.core.policies.base import Policy
from services.scheduler.core.prefill_budget import PrefillBudget
from services.scheduler.core.prefix_cache import CachedBlock
from services.scheduler.core.rates import Rates, newest_rates
from services.scheduler.core.request import Request
from services.scheduler.core.seats import Ending, Ghost, InFlight, PlanDraft, Seat
from shared.messages import EndReason, NewRow, StepPlan, StepResult, Tick
from shared.packing import pack_int32


class Lane:
    """State of one worker incarnation. `index` is its place in the order of joining."""

    def __init__(
        self,
        worker: str,
        incarnation: int,
        index: int,
        pool: BlockPool,
        config: SchedulerConfig,
        policy: Policy,
        block_bytes: int = 0,
        fingerprint: str = "",
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.index = index
        self.pool = pool
        self.config = config
        self.policy = policy
        self.block_bytes = block_bytes
        """0: not known."""
        self.fingerprint = fingerprint
        """Of its numerics; empty: not known."""
        self.draining = False
        self.broken = False
        """A result contradicts its plan, or is missing in the log: nothing it says is believed any more."""
        self.clock = DecodeClock(config.block_size)
        self.answered = 0
        self.in_flight: deque[InFlight] = deque()
        self.seats: dict[int, Seat] = {}
        self.free_rows = list(range(config.max_rows))
        self.prefill: dict[int, Seat] = {}
        self.ghosts: dict[int, Ghost] = {}
        self.searches: dict[int, Seat] = {}
        """Beam searches by the row of their seat."""
        self.beam_rows: dict[int, Seat] = {}
        """Their other rows that the worker knows."""
        self.swapped: dict[str, Request] = {}
        """Requests whose KV lies in the host pool, by id."""
        self.trial: Seat | None = None
        """The suspect that was seated last."""
        self.history = TokenHistory(config.max_num_seqs, base=1)
        self.rates = Rates()
        self.num_prefilled = 0
        """Tokens computed in chunks so far; with the next a gauge for people, so not in the snapshot."""
        self.num_generated = 0

    @property
    def planned(self) -> int:
        """The last plan that was made."""
        return self.clock.planned

    # ------------------------------------------------------------ what it can take

    @property
    def can_plan(self) -> bool:
        return len(self.in_flight) < self.config.plan_ahead and not self.broken

    @property
    def is_idle(self) -> bool:
        return not (self.in_flight or self.seats or self.ghosts or self.swapped)

    @property
    def is_empty(self) -> bool:
        """Nobody is here whom a plan could concern."""
        return not (self.seats or self.ghosts or self.swapped)

    @property
    def has_drops(self) -> bool:
        """Whether the next plan drops rows."""
        return any(not ghost.dropped for ghost in self.ghosts.values())

    @property
    def num_rows(self) -> int:
        """Rows that requests have."""
        if not self.searches:
            return len(self.seats)
        return len(self.seats) + sum(seat.request.num_rows - 1 for seat in self.searches.values())

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens that no plan computes yet."""
        return sum(seat.known - seat.computed for seat in self.prefill.values()) if self.prefill else 0

    def next_step_s(self) -> float | None:
        """Seconds that the worker needs for the oldest plan in flight, by its own rates; None if they are not known."""
        plan, rates = self.in_flight[0], self.rates
        num_bytes = plan.num_copied * self.block_bytes
        deepest = max((computed for _, computed in plan.chunks), default=0)
        return rates.step_s(plan.num_yields + len(plan.searches), plan.num_prefill, num_bytes, deepest)

    def holds(self, request: Request) -> bool:
        """Whether the request fits when nothing else is here."""
        return self.pool.status(request.most_blocks(self.config.block_size)) is not AllocStatus.NEVER

    def match(self, request: Request) -> list[CachedBlock]:
        """Cached blocks with which a waiting request could begin here."""
        if not self.config.enable_prefix_caching:
            return []
        return residency.match(request, self.pool, self.config.block_size)

    # ------------------------------------------------------------ making a plan

    def grow(self, draft: PlanDraft) -> None:
        """Give a block to every decode row that crosses a boundary; the pool has enough."""
        seats = self.clock.boundary()
        blocks = self.pool.allocate_each([seat.blocks[-1] for seat in seats.values()])
        for seat, block_id in zip(seats.values(), blocks, strict=True):
            seat.blocks.append(block_id)
        draft.give_each(seats, blocks)

    def admit(self, draft: PlanDraft, request: Request, hits: Sequence[CachedBlock] = ()) -> Seat:
        """Seat `request` with blocks for all of its known tokens, cached ones in front.

        `hits` is what matched in this tick; some of it may have been evicted since.
        """
        return self._seat(draft, request, hits)

    def seat_again(self, draft: PlanDraft, request: Request, hits: Sequence[CachedBlock], swapped: SwappedOut) -> Seat:
        """Seat a swapped request; what is not hit comes from the host pool."""
        seat = self._seat(draft, request, hits, at_least=swapped.num_computed)
        num_hits, num_slots = seat.num_kept, len(swapped.slots)
        self.pool.tier.read(swapped.slots, num_hits, seat.blocks[num_hits:num_slots])
        return seat

    def _seat(self, draft: PlanDraft, request: Request, hits: Sequence[CachedBlock], *, at_least: int = 0) -> Seat:
        blocks = self.pool.hit(hits)
        num_hits = len(blocks)
        after = blocks[-1] if blocks else NOWHERE
        blocks += self.pool.allocate(self.config.blocks_for(request.num_tokens) - num_hits, after)
        seat = self.put(draft, request, blocks, num_computed=max(at_least, num_hits * self.config.block_size))
        if num_hits:
            seat.num_kept, seat.parent = num_hits, hits[num_hits - 1].serial
        return seat

    def put(self, draft: PlanDraft, request: Request, blocks: list[int], *, num_computed: int) -> Seat:
        """Put `request` on the lowest free row, with blocks for its known tokens, `num_computed` of them computed."""
        seat = Seat(
            lane=self,
            row=heappop(self.free_rows),
            request=request,
            added=draft.plan_id,
            known=request.num_tokens,
            blocks=blocks,
            computed=num_computed,
        )
        self.seats[seat.row] = self.prefill[seat.row] = seat
        request.seat = seat
        if suspects.is_suspect(request, self.config):
            self.trial = seat
        if request.submission.params.beam_width:
            beam_rows.enter(self, seat)
        self.policy.on_seated(seat)
        draft.give_blocks(seat.row, blocks)
        draft.added.append(
            NewRow(
                row=seat.row,
                request_id=request.request_id,
                tokens=request.known_tokens(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_computed,
                params=request.submission.params,
                traceparent=request.submission.traceparent,
            )
        )
        return seat

    def prefill_chunk(self, draft: PlanDraft, seat: Seat, budget: PrefillBudget) -> None:
        """Schedule as much of the seat's known tokens as the budget has for it, and take that from it."""
        num_scheduled = min(seat.known - seat.computed, budget.of(seat.request))
        if not num_scheduled:
            return
        budget.spend(num_scheduled)
        seat.computed += num_scheduled
        self.num_prefilled += num_scheduled
        draft.chunks.append((seat.row, num_scheduled))
        draft.reached.append((seat.row, seat.computed))
        if seat.computed == seat.known:
            draft.completed.append(seat)

    def close(self, draft: PlanDraft, tick: Tick) -> StepPlan:
        """Make the draft the lane's next plan and move the clock."""
        plan_id = draft.plan_id
        decoding = [seat for seat in draft.completed if seat.beams is None]
        num_prefill = sum(num_tokens for _, num_tokens in draft.chunks)
        num_yields, beams = self.clock.num_rows + len(decoding), [beam.row for beam in draft.beams]
        plan = InFlight(plan_id, num_yields, draft.reached, beams, num_prefill)
        for seat in draft.completed:
            if seat.beams is not None:
                beam_rows.complete(self, seat, plan)
        self.in_flight.append(plan)
        self.clock.advance()
        for seat in sorted(decoding, key=_by_row):
            self._start_decode(seat, plan_id)
        dropped, copies = self._drop_ghosts(plan_id), self.pool.take_copies()
        plan.num_copied = sum(len(copy.pairs) // 8 for copy in copies)
        return StepPlan(
            plan_id=plan_id,
            tick=tick,
            dropped=dropped,
            added=tuple(draft.added),
            blocks=pack_int32(draft.blocks),
            chunks=tuple(draft.chunks),
            copies=copies,
            beams=tuple(draft.beams),
        )

    def _start_decode(self, seat: Seat, plan_id: int) -> None:
        del self.prefill[seat.row]
        output_index = seat.known - seat.request.num_prompt_tokens
        seat.first = seat.mark = plan_id
        seat.last = plan_id + seat.request.submission.params.max_tokens - output_index - 1
        self._schedule_decode(seat)

    def _schedule_decode(self, seat: Seat) -> None:
        self.policy.on_decoding(seat)
        self.clock.add(seat)

    def _drop_ghosts(self, plan_id: int) -> tuple[int, ...]:
        dropped = [ghost for ghost in self.ghosts.values() if not ghost.dropped]
        for ghost in dropped:
            ghost.dropped = plan_id
        self._settle()
        return tuple(sorted(ghost.row for ghost in dropped))

    # ------------------------------------------------------------ taking a result

    def commit(self, result: StepResult) -> list[Ending]:
        """Take the result of the oldest plan in flight; the live requests that it ends, with their whole output."""
        plan = self.in_flight.popleft()
        self.answered = result.step_id
        self.num_generated += plan.num_yields
        self.history.append(result.tokens)
        if result.logprobs:
            logprobs.note(self.seats, result)
        self.rates = newest_rates(self.rates, result.rates)
        endings = [ending for row, reason in result.ended if (ending := self._end(result, row, EndReason(reason)))]
        self._settle()
        if self.config.enable_prefix_caching:
            self._keep_chunks(plan)
            self._keep_in_turn()
        endings += beam_rows.take(self, result)
        if self.history.is_full:
            self._empty_history()
        return endings

    def _end(self, result: StepResult, row: int, reason: EndReason) -> Ending | None:
        seat = self.seats.get(row) or self.beam_rows.get(row)
        leaver = seat or self.ghosts[row]
        for plan in self.in_flight:
            plan.forget(row, leaver.yields_in(plan.plan_id))
        if seat is None:
            if not self.ghosts[row].dropped:  # the worker was faster than the plan that would drop it
                del self.ghosts[row]
                heappush(self.free_rows, row)
            return None
        self.clock.remove(seat)
        if is_silent(result.tokens, row):
            seat.last = result.step_id - 1
        self.collect(seat)
        if reason is EndReason.ERROR:
            self.pool.forget(seat.blocks)  # who knows what lies there
        else:
            self._keep_decoded(seat)
        self._leave(seat, ended_row=row)
        heappush(self.free_rows, row)
        return Ending(seat.request, reason)

    def _empty_history(self) -> None:
        for seat in self.seats.values():
            self.collect(seat)
        self.history.clear()

    # ------------------------------------------------------------ caching blocks

    def _keep_chunks(self, plan: InFlight) -> None:
        """Cache what the chunks of an answered plan filled."""
        for row, computed in plan.chunks:
            seat = self.seats.get(row)
            if seat is not None and seat.added <= plan.plan_id:  # else another one has the row by now
                residency.keep(seat, self.pool, computed, self.config.block_size)

    def _keep_in_turn(self) -> None:
        """Cache what decode rows filled: in every step some rows have their turn, and all have within `MAX_STEPS`."""
        for row in range(self.answered % MAX_STEPS, self.config.max_rows, MAX_STEPS):
            seat = self.seats.get(row)
            if seat is not None and seat.first:
                self.collect(seat)
                self._keep_decoded(seat)

    def _keep_decoded(self, seat: Seat) -> None:
        """Cache the full blocks of a seat whose tokens are collected. Its last token's KV is not written yet."""
        num_written = self.num_written(seat)
        if seat.first and num_written >= seat.known and self.config.enable_prefix_caching:
            residency.keep(seat, self.pool, num_written, self.config.block_size)

    def num_written(self, seat: Seat) -> int:
        """Tokens of the seat whose KV is written; of a row in prefill only right while nothing is in flight."""
        return seat.known + min(self.answered, seat.last) - seat.first if seat.first else seat.computed

    # ------------------------------------------------------------ leaving

    def num_committed(self, seat: Seat) -> int:
        """Output tokens that are committed."""
        return len(seat.request.output) + max(0, self._collectable(seat) - seat.mark)

    def collect(self, seat: Seat) -> None:
        """Bring the request's `output` up to the last answered step."""
        stop = self._collectable(seat)
        if seat.mark < stop:
            seat.request.output.extend(self.history.row(seat.row, seat.mark, stop))
            seat.mark = stop

    def _collectable(self, seat: Seat) -> int:
        return min(self.answered, seat.last) + 1 if seat.first else 0

    def drop(self, seat: Seat) -> None:
        """Take a request off its row: the next plan drops it, its blocks are quarantined while plans are in flight."""
        self.collect(seat)
        self._keep_decoded(seat)
        self._leave(seat)
        self.ghosts[seat.row] = Ghost(seat.row, seat.first, min(seat.last, self.planned))

    def tell_policy_left(self, seat: Seat) -> None:
        """The seat yields nothing more, and its tokens are collected."""
        self.policy.on_left(seat, max(0, self._collectable(seat) - seat.first) if seat.first else 0)

    def _leave(self, seat: Seat, ended_row: int | None = None) -> None:
        self.tell_policy_left(seat)
        del self.seats[seat.row]
        self.prefill.pop(seat.row, None)
        self.clock.remove(seat)
        blocks, seat.blocks = seat.blocks, []
        if seat.beams is not None:
            blocks += beam_rows.leave(self, seat, ended_row)
        if self.in_flight:
            self.pool.quarantine(blocks, until=self.planned)
        else:
            self.pool.release(blocks)
        seat.request.seat = None

    def _settle(self) -> None:
        """Free what no plan without a result can touch any more."""
        self.pool.settle(self.answered)
        gone = [ghost.row for ghost in self.ghosts.values() if 0 < ghost.dropped <= self.answered + 1]
        for row in gone:
            del self.ghosts[row]
            heappush(self.free_rows, row)

    # ------------------------------------------------------------ restoring

    def restore_rows(self, seats: Iterable[Seat], ghosts: Iterable[Ghost]) -> None:
        """Rebuild what follows from the occupants, which come in the order of `seats` and `ghosts`."""
        self.seats = {seat.row: seat for seat in seats}
        for seat in self.seats.values():
            self.policy.on_seated(seat)
        self.ghosts = {ghost.row: ghost for ghost in ghosts}
        self.searches = {row: seat for row, seat in self.seats.items() if seat.beams is not None}
        on_trial = [seat for seat in self.seats.values() if suspects.is_suspect(seat.request, self.config)]
        self.trial = max(on_trial, key=attrgetter("added"), default=None)
        spare = beam_rows.restore(self)
        taken = {*self.seats, *self.ghosts, *spare}
        self.free_rows = [row for row in range(self.config.max_rows) if row not in taken]
        self.prefill = {row: seat for row, seat in self.seats.items() if seat.computed < seat.known}
        decoding = [seat for seat in self.seats.values() if seat.first]
        for seat in sorted(decoding, key=lambda seat: (seat.first, seat.row)):
            self._schedule_decode(seat)


def _by_row(seat: Seat) -> int:
    return seat.row
