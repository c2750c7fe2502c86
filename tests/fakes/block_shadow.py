"""Who holds which block, followed on the wire alone: plans and results of one worker incarnation."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.cpu_tier import SwappedOut
from shared.messages import BeamRow, CopyKind, NewRow, StepPlan, StepResult, Submission
from shared.packing import unpack_int32


@dataclass(slots=True)
class ShadowRow:
    """One row by its plans. `last_holding` is set when it left: the last plan made while it held its blocks."""

    request_id: str
    num_hits: int
    """Blocks at the front of its table that were computed before."""
    blocks: list[int] = field(default_factory=list)
    last_holding: int | None = None
    named: int = 0
    """Of a beam: the plan that made it what it is."""
    candidates_in: int = 0
    """The last result with candidates for it."""

    def leave(self, planned: int) -> None:
        """It holds nothing after the plan `planned`; a beam that stood still, nothing after its result."""
        stands_still = self.candidates_in >= max(1, self.named)
        self.last_holding = self.candidates_in if stands_still else planned


@dataclass(slots=True)
class Shadow:
    """One worker incarnation."""

    config: SchedulerConfig
    records: Mapping[str, Submission]
    counts: Counter[str]
    """Of all incarnations: `hit tokens`, `salted hits`, `shared`, `beam copies`."""
    rows: dict[int, ShadowRow] = field(default_factory=dict)
    holders: dict[int, list[ShadowRow]] = field(default_factory=dict)
    """Rows that had a block since it was last given out to be written."""
    owners: dict[int, tuple[str, str]] = field(default_factory=dict)
    """(tenant, cache salt) for which a block, or `~slot` of the host pool, was written."""
    planned: int = 0
    answered: int = 0
    unapplied: deque[StepResult] = field(default_factory=deque)

    def result(self, result: StepResult) -> None:
        """The core has applied it."""
        if not self.unapplied or self.unapplied[0] is not result:
            return
        self.unapplied.popleft()
        self.answered = result.step_id
        for candidates in result.candidates:
            if candidates.row in self.rows:
                self.rows[candidates.row].candidates_in = result.step_id
        for row, _ in result.ended:
            ended = self.rows.pop(row, None)
            if ended is not None:
                ended.last_holding = self.planned
                for other in self.rows.values():  # its beams go with it
                    if other.request_id == ended.request_id:
                        other.last_holding = self.planned

    def plan(self, plan: StepPlan, back: Sequence[str]) -> None:
        """The core has decided it. `back`: those added that were swapped out here."""
        for row in plan.dropped:
            dropped = self.rows.pop(row, None)
            if dropped is not None:
                dropped.leave(self.planned)
        self._copies(plan)
        for new in plan.added:
            assert new.row not in plan.dropped, "a row is reused in the plan that drops it"
            assert new.row not in self.rows, "a row is in use"
            self.rows[new.row] = ShadowRow(new.request_id, new.num_computed_tokens // self.config.block_size)
            self._judge_hits(new, back)
        self._beams(plan)
        assert len(self.rows) <= self.config.max_num_seqs
        self._blocks(plan)
        self.planned = plan.plan_id

    def _copies(self, plan: StepPlan) -> None:
        """Only what was written is copied away. (What comes from the host was, if the worker has it; it looks.)"""
        for block_id, _ in pairs_of(plan, CopyKind.OUT):
            assert block_id in self.holders, f"block {block_id} was never written"
        for kind in CopyKind:
            for source, into in pairs_of(plan, kind):
                source, into = (~source if kind is CopyKind.IN else source), (~into if kind is CopyKind.OUT else into)
                if source in self.owners:
                    self.owners[into] = self.owners[source]

    def _blocks(self, plan: StepPlan) -> None:
        filled = {block_id for _, block_id in pairs_of(plan, CopyKind.IN)}
        for row, block_id in _pairs(plan.blocks):
            taker = self.rows[row]
            if len(taker.blocks) < taker.num_hits:
                self._judge_owner(taker, block_id)
            if len(taker.blocks) < taker.num_hits and block_id not in filled:
                assert block_id in self.holders, f"block {block_id} was never written"
                self._share(taker, block_id)
            else:
                filled.discard(block_id)  # whoever else begins with it in this plan hits it
                self._take(taker, block_id)
            limit = self.records[taker.request_id]
            most = len(limit.prompt_tokens) // 4 + limit.params.max_tokens - 1
            assert len(taker.blocks) <= self.config.blocks_for(most), "blocks for tokens that can never be computed"

    def _take(self, taker: ShadowRow, block_id: int) -> None:
        """The block is to be written, so nobody may hold it."""
        for holder in self.holders.pop(block_id, ()):
            assert holder.last_holding is not None, f"block {block_id} is in two tables"
            assert holder.last_holding <= self.answered, f"block {block_id} is named by an unanswered plan"
        self.owners[block_id] = self._domain(taker)
        self._share(taker, block_id)

    def _judge_owner(self, taker: ShadowRow, block_id: int) -> None:
        """Nobody is served from another tenant's blocks, nor from those of another salt."""
        assert self.owners[block_id] == self._domain(taker), f"block {block_id} is somebody else's"
        self.counts["salted hits"] += bool(self._domain(taker)[1])

    def _domain(self, row: ShadowRow) -> tuple[str, str]:
        submission = self.records[row.request_id]
        return submission.tenant, submission.cache_salt

    def _share(self, taker: ShadowRow, block_id: int) -> None:
        sharers = self.holders.setdefault(block_id, [])
        self.counts["shared"] += any(holder.last_holding is None for holder in sharers)
        sharers.append(taker)
        taker.blocks.append(block_id)

    def _beams(self, plan: StepPlan) -> None:
        """Beams take over from all present rows of their search, whose result is known."""
        parents = {beam.parent: self.rows[beam.parent] for beam in plan.beams}
        searching = {parent.request_id for parent in parents.values()}
        for number, row in list(self.rows.items()):
            if row.request_id in searching:
                assert row.candidates_in >= max(1, row.named), "a search is planned ahead of its result"
                row.last_holding = row.candidates_in
                del self.rows[number]
        copies = {into: source for source, into in pairs_of(plan, CopyKind.WITHIN)}
        for beam in plan.beams:
            assert beam.row not in self.rows and beam.row not in plan.dropped, "a row is in use"
            self._heir(beam, parents[beam.parent], copies).named = plan.plan_id

    def _heir(self, beam: BeamRow, parent: ShadowRow, copies: dict[int, int]) -> ShadowRow:
        heir = self.rows[beam.row] = ShadowRow(parent.request_id, num_hits=0)
        for block_id in parent.blocks if beam.block == -1 else parent.blocks[:-1]:
            self._share(heir, block_id)
        if beam.block != -1:
            assert copies[beam.block] == parent.blocks[-1], "a copy of another block"
            self._take(heir, beam.block)
            self.counts["beam copies"] += 1
        return heir

    def _judge_hits(self, new: NewRow, back: Sequence[str]) -> None:
        """Only whole blocks are hit, and never a request's last token. A fork has all of its prompt but that."""
        assert new.num_computed_tokens < len(new.tokens) // 4
        is_fork = self.records[new.request_id].group and new.num_computed_tokens == new.num_prompt_tokens - 1
        if is_fork or new.request_id in back:
            return
        assert new.num_computed_tokens % self.config.block_size == 0
        assert self.config.enable_prefix_caching or not new.num_computed_tokens
        self.counts["hit tokens"] += new.num_computed_tokens


def judge_swaps(
    plan: StepPlan, before: dict[str, SwappedOut], after: dict[str, SwappedOut], back: Sequence[str], block_size: int
) -> int:
    """Pinned host blocks are nobody else's; who comes back is given all that it left; nobody goes before them.

    `before` and `after` the plan: what is swapped out (after it: on its worker). Answers how many it swaps out.
    """
    pairs = {kind: pairs_of(plan, kind) for kind in CopyKind}
    left = [id for id in after if id not in before]
    put = [slot for _, slot in pairs[CopyKind.OUT]]
    read = [slot for slot, _ in pairs[CopyKind.IN]]
    for request_id, swapped in after.items():
        assert not set(swapped.slots) & set(read), "what is swapped out stays there"
        assert set(swapped.slots) <= set(put) if request_id in left else not set(swapped.slots) & set(put)
    tables: dict[int, list[int]] = {}
    for row, block_id in _pairs(plan.blocks):
        tables.setdefault(row, []).append(block_id)
    for new in plan.added:
        if new.request_id in back:
            slots, blocks = before[new.request_id].slots, tables[new.row]
            came = {block: slot for slot, block in pairs[CopyKind.IN]}
            expected = [(slot, block) for slot, block in zip(slots, blocks, strict=False) if block in came]
            assert expected == [(came[block], block) for _, block in expected], "blocks in another order"
            assert len(slots) - len(expected) <= new.num_computed_tokens // block_size
    assert not (left and plan.added), "a plan swaps out and seats"
    assert [new.request_id for new in plan.added[: len(back)]] == back, "those that come back go first"
    assert not after or len(plan.added) == len(back), "somebody was admitted before a swapped one"
    return len(left)


def pairs_of(plan: StepPlan, kind: CopyKind) -> list[tuple[int, int]]:
    """All copies of one kind."""
    return [pair for copy in plan.copies if copy.kind is kind for pair in _pairs(copy.pairs)]


def _pairs(packed: bytes) -> list[tuple[int, int]]:
    numbers = unpack_int32(packed)
    return list(zip(numbers[::2], numbers[1::2], strict=True))
