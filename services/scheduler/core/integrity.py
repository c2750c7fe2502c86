"""Every invariant of the core's state, recomputed from the seats."""

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from services.scheduler.core import prefix_cache
from services.scheduler.core.beam_rows import BeamRows
from services.scheduler.core.extents import NOWHERE
from services.scheduler.core.lane import Lane
from services.scheduler.core.request import RequestState
from services.scheduler.core.seats import Seat

if TYPE_CHECKING:
    from services.scheduler.core.scheduler import SchedulerCore


def check_integrity(core: "SchedulerCore") -> None:
    """Raises AssertionError on the first invariant that does not hold."""
    for lane in core.lanes.values():
        _check_blocks(lane)
        _check_cache(lane)
        _check_tier(lane)
        _check_rows(lane)
        _check_clock(lane)
    _check_requests(core)


def _check_blocks(lane: Lane) -> None:
    """Free, evictable, used and quarantined blocks are all blocks; references are exact; tables have what they need."""
    pool = lane.pool
    tables = [seat.blocks for seat in lane.seats.values()] + [blocks for _, blocks in pool.quarantined()]
    tables += [tail for seat in lane.searches.values() if seat.beams for tail in seat.beams.tails]
    held = Counter(itertools.chain.from_iterable(tables))
    runs = pool.free.runs()
    assert all(start + length < later for (start, length), (later, _) in itertools.pairwise(runs)), "runs not merged"
    free = [block for start, length in runs for block in range(start, start + length)]
    assert len(free) == pool.num_free
    idle = list(pool.evictable)
    assert sorted([*held, *free, *idle]) == list(range(pool.num_blocks)), "a block is lost, or in two places"
    for block in range(pool.num_blocks):
        assert pool.references(block) == held[block], f"block {block} is miscounted"
        assert held[block] <= 1 or _is_behind(lane, block), f"block {block} is in two tables and still written"
    assert all(pool.cache.at(block) for block in idle), "an evictable block is not cached"
    for seat in lane.seats.values():
        if seat.beams is None or not seat.beams.rows:
            assert len(seat.blocks) == _blocks_held(lane, seat), f"row {seat.row} has {len(seat.blocks)} blocks"
        else:
            _check_beams(lane, seat, seat.beams)


def _check_tier(lane: Lane) -> None:
    """Free, demoted and pinned host blocks are all of them; the cache knows the demoted ones and no others."""
    tier = lane.pool.tier
    assert tier.is_settled
    runs = tier.free.runs()
    assert all(start + length < later for (start, length), (later, _) in itertools.pairwise(runs)), "runs not merged"
    free = [slot for start, length in runs for slot in range(start, start + length)]
    assert len(free) == tier.num_free
    pinned = []
    for request_id, request in lane.swapped.items():
        swapped = request.swapped
        assert swapped is not None and swapped.lane is lane and request.request_id == request_id
        assert 0 < swapped.num_computed < request.num_tokens
        assert len(swapped.slots) == lane.config.blocks_for(swapped.num_computed)
        pinned += swapped.slots
    assert sorted([*free, *tier.demoted(), *pinned]) == list(range(tier.num_blocks)), "a host block is lost, or twice"
    assert lane.config.demotion or not tier.num_demoted
    assert sorted(tier.demoted()) == sorted(entry.slot for entry in lane.pool.cache if entry.is_demoted)


def _is_behind(lane: Lane, block: int) -> bool:
    """Whether every table with the block has it at one place, full: what plans write from now on lies behind it."""
    tables = [table for seat in lane.seats.values() for table in _tables(lane, seat) if block in table[0]]
    ends = {(blocks.index(block) + 1) * lane.config.block_size for blocks, _ in tables}
    return len(ends) <= 1 and all(num_written >= end for _, num_written in tables for end in ends)


def _tables(lane: Lane, seat: Seat) -> list[tuple[list[int], int]]:
    """(blocks, tokens whose KV plans up to now write) of the seat, or of each of its beams."""
    if seat.beams is None or not seat.beams.rows:
        return [(seat.blocks, _num_written(lane, seat))]
    num_written = seat.known + seat.beams.search.num_tokens - bool(seat.beams.moves)
    return [(seat.blocks + tail, num_written) for tail in seat.beams.tails]


def _num_written(lane: Lane, seat: Seat) -> int:
    """Tokens whose KV plans up to now write."""
    return seat.known + min(lane.planned, seat.last) - seat.first if seat.first else seat.computed


def _check_cache(lane: Lane) -> None:
    """Every entry follows from its parent; every kept block holds its request's tokens."""
    pool, size = lane.pool, 4 * lane.config.block_size
    entries = list(pool.cache)
    assert lane.config.enable_prefix_caching or not entries
    by_serial = {entry.serial: entry for entry in entries}
    assert len(by_serial) == len(entries) == len({entry.key for entry in entries})
    for entry in entries:
        assert len(entry.tokens) == size and pool.cache.get(entry.key) is entry
        before = prefix_cache.root_key(entry.parent) if isinstance(entry.parent, bytes) else None
        if isinstance(entry.parent, int) and entry.parent in by_serial:
            before = by_serial[entry.parent].key
        assert before is None or entry.key == prefix_cache.block_key(before, entry.tokens), (
            "a key is not that of its chain"
        )
    for seat in lane.seats.values():
        tokens = seat.request.tokens_between(0, max(seat.num_kept * lane.config.block_size, seat.known))
        for index, block in enumerate(seat.blocks):
            entry_of = pool.cache.at(block)
            if entry_of is not None:
                assert index < seat.num_kept or pool.references(block) > 1, f"nobody cached block {block}"
                if index >= seat.num_kept:  # a fork's sibling did
                    assert (index + 1) * lane.config.block_size <= seat.request.num_prompt_tokens
                assert entry_of.tokens == tokens[index * size : (index + 1) * size], "a block holds other tokens"


def _blocks_held(lane: Lane, seat: Seat) -> int:
    """Blocks for every token whose KV plans up to now write."""
    decoded = max(0, min(lane.planned, seat.last) - seat.first) if seat.first else 0
    return lane.config.blocks_for(seat.known + decoded)


def _check_beams(lane: Lane, seat: Seat, beams: BeamRows) -> None:
    """One table per beam, with blocks for what plans up to now write; the rows are the search's."""
    assert len(seat.blocks) == seat.known // lane.config.block_size
    assert len(beams.rows) == len(beams.tails) == len(beams.search.beams) <= seat.request.num_rows
    assert len(set(beams.rows)) == len(beams.rows) and {*beams.rows} <= {seat.row, *beams.spare}
    assert not beams.moves or [move.row for move in beams.moves] == beams.rows
    assert bool(beams.moves) != bool(beams.awaited), "a search waits for nothing"
    sources = [move.source for move in beams.moves] or [NOWHERE] * len(beams.rows)
    for (blocks, num_written), source in zip(_tables(lane, seat), sources, strict=True):
        assert len(blocks) == lane.config.blocks_for(num_written) - (source != NOWHERE), f"a beam of row {seat.row}"


def _check_rows(lane: Lane) -> None:
    searches = [seat.beams for seat in lane.seats.values() if seat.beams]
    spare = [row for beams in searches for row in beams.spare]
    rows = sorted([*lane.seats, *spare, *lane.ghosts, *lane.free_rows])
    assert rows == list(range(lane.config.max_rows)), "a row is lost"
    assert sorted(lane.beam_rows) == sorted(row for beams in searches for row in beams.made)
    assert list(lane.searches) == [row for row, seat in lane.seats.items() if seat.beams]
    for row, seat in lane.seats.items():
        assert (seat.beams is not None) == (seat.request.submission.params.beam_width > 0)
        assert seat.row == row and seat.lane is lane
        assert seat.request.seat is seat, f"row {row} is not its request's seat"


def _check_clock(lane: Lane) -> None:
    seats = list(lane.seats.values())
    decoding = [seat for seat in seats if seat.first and seat.last > lane.planned]
    assert lane.clock.num_rows == len(decoding) <= lane.config.max_rows
    assert sorted(lane.prefill) == sorted(seat.row for seat in seats if seat.computed < seat.known)
    phased = [seat.row for phase in lane.clock.phases() for seat in phase]
    assert sorted(phased) == sorted(seat.row for seat in decoding)
    assert sorted(lane.clock.days()) == sorted((seat.last, seat.row) for seat in seats if seat.first)
    assert [plan.plan_id for plan in lane.in_flight] == list(range(lane.answered + 1, lane.planned + 1))
    assert len(lane.in_flight) <= lane.config.plan_ahead
    assert lane.history.end == lane.answered + 1
    for seat in seats:
        assert seat.computed <= seat.known
        assert (seat.computed == seat.known and seat.beams is None) == (seat.first > 0)


def _check_requests(core: "SchedulerCore") -> None:
    waiting = list(core.waiting)
    core.waiting.check_integrity()
    assert len(set(waiting)) == len(waiting)
    for request in core.requests.values():
        is_waiting = request.seat is None and request.swapped is None
        if is_waiting:
            assert request.state is RequestState.WAITING
        else:
            assert request.state is (RequestState.RUNNING if request.swapped is None else RequestState.SWAPPED)
            assert request.seat is None or request.swapped is None
        assert (request in waiting) == is_waiting
        if request.seat is not None:
            assert core.lanes[request.seat.lane.worker].seats[request.seat.row] is request.seat
    elsewhere = sum(len(lane.seats) + len(lane.swapped) for lane in core.lanes.values())
    assert len(core.requests) == len(waiting) + elsewhere
