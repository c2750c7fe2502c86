"""The whole state of the core, to bytes and back, exactly: a restored core makes the same plans, byte for byte.

Prompts are not in it; they are in the request records, which `restore` is given. What follows from the seats (decode
clock, reference counts, free rows) is not in it either, and rebuilt.
"""

from collections.abc import Mapping

import msgspec

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.counters import Counters
from services.scheduler.core.cpu_tier import SwappedOut
from services.scheduler.core.history import TokenHistory
from services.scheduler.core.lane import Lane
from services.scheduler.core.policies.base import PolicyState
from services.scheduler.core.prefix_cache import Parent
from services.scheduler.core.rates import Rates
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.saved_beams import SavedBeams, restore_beams, save_beams
from services.scheduler.core.saved_pool import SavedPool, restore_pool, save_pool
from services.scheduler.core.scheduler import KnownWorker, SchedulerCore
from services.scheduler.core.seats import Ghost, InFlight, Seat
from shared.errors import PagewireError
from shared.messages import FinishReason, Submission
from shared.packing import pack_float32, pack_int32, unpack_float32, unpack_int32

FORMAT = 11
"""Rises with every change of the structs below or of what the core makes of them."""


class UnusableSnapshot(PagewireError):
    """Other format, other configuration, or a record that is gone: the scheduler must start cold."""


class _Struct(msgspec.Struct, frozen=True, array_like=True):
    pass


class _SavedRequest(_Struct, frozen=True):
    request_id: str
    arrival: int
    arrived_at: float
    num_bypassed: int
    output: bytes
    stop_at: int | None
    num_preemptions: int
    has_left_queue: bool
    num_cached_tokens: int
    logprobs: bytes


class _SavedSeat(_Struct, frozen=True):
    row: int
    request_id: str
    added: int
    known: int
    blocks: bytes
    computed: int
    first: int
    last: int
    num_kept: int
    parent: Parent
    beams: SavedBeams | None


class _SavedLane(_Struct, frozen=True):
    worker: str
    incarnation: int
    index: int
    draining: bool
    broken: bool
    planned: int
    answered: int
    in_flight: list[tuple[int, int, list[tuple[int, int]], list[int]]]
    seats: list[_SavedSeat]
    ghosts: list[tuple[int, int, int, int]]
    """(row, first, last, dropped)"""
    pool: SavedPool
    block_bytes: int
    rates: tuple[float, ...]
    swapped: list[tuple[str, bytes, int]]
    """(request, packed slots, computed tokens)"""


class _Snapshot(_Struct, frozen=True):
    format: int
    config: dict[str, bool | int | float | str]
    policy: PolicyState
    requests: list[_SavedRequest]
    """Live ones, in the order of `SchedulerCore.requests`."""
    lanes: list[_SavedLane]
    known_workers: list[tuple[str, int, int]]
    counters: tuple[int, ...]
    finished: list[int]
    """By reason, in the order of `FinishReason`."""
    ended_ids: list[str]
    num_arrivals: int
    num_joins: int
    times_passed_over: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Snapshot)


def take_snapshot(core: SchedulerCore) -> bytes:
    """The state between two ticks: `take_events` and `take_finished` have been called."""
    return _encoder.encode(
        _Snapshot(
            format=FORMAT,
            config=_config_dict(core.config),
            policy=core.policy.save(),
            requests=[_save_request(core, request) for request in core.requests.values()],
            lanes=[_save_lane(lane) for lane in core.lanes.values()],
            known_workers=[(name, known.fenced, known.num_blocks) for name, known in core.known_workers.items()],
            counters=tuple(getattr(core.counters, name) for name in Counters.__slots__),
            finished=[core.finished_by_reason[reason] for reason in FinishReason],
            ended_ids=list(core.ended_ids),
            num_arrivals=core.num_arrivals,
            num_joins=core.num_joins,
            times_passed_over=core.times_passed_over,
        )
    )


def snapshot_request_ids(data: bytes) -> list[str]:
    """The requests whose submissions `restore` needs.

    Raises:
        UnusableSnapshot: the bytes are none of this format.
    """
    return [saved.request_id for saved in _decode(data).requests]


def restore(data: bytes, config: SchedulerConfig, submissions: Mapping[str, Submission]) -> SchedulerCore:
    """The core that `take_snapshot` was given.

    Raises:
        UnusableSnapshot: other format or configuration, or a submission is missing.
    """
    saved = _decode(data)
    core = SchedulerCore(config)
    if saved.config != _config_dict(config):
        raise UnusableSnapshot("the snapshot was taken under another configuration")
    for saved_request in saved.requests:
        request = core.requests[saved_request.request_id] = _restore_request(saved_request, submissions)
        core.groups.add(request)
        core.policy.on_live(request)
    for saved_lane in saved.lanes:
        core.lanes[saved_lane.worker] = _restore_lane(saved_lane, core)
    for request in core.requests.values():
        if request.state is RequestState.WAITING:
            core.waiting.push(request)
    core.policy.load(saved.policy)
    core.known_workers = {name: KnownWorker(fenced, num_blocks) for name, fenced, num_blocks in saved.known_workers}
    core.counters = Counters(*saved.counters)
    core.finished_by_reason = dict(zip(FinishReason, saved.finished, strict=True))
    core.ended_ids = dict.fromkeys(saved.ended_ids)
    core.num_arrivals = saved.num_arrivals
    core.num_joins = saved.num_joins
    core.times_passed_over = saved.times_passed_over
    core.resume_stops()
    return core


def _decode(data: bytes) -> _Snapshot:
    try:
        saved = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableSnapshot(f"no snapshot of format {FORMAT}: {error}") from error
    if saved.format != FORMAT:
        raise UnusableSnapshot(f"snapshot of format {saved.format}, not {FORMAT}")
    return saved


def _config_dict(config: SchedulerConfig) -> dict[str, bool | int | float | str]:
    return {name: getattr(config, name) for name in config.__slots__}


def _save_request(core: SchedulerCore, request: Request) -> _SavedRequest:
    core.collect(request)
    return _SavedRequest(
        request_id=request.request_id,
        arrival=request.arrival,
        arrived_at=request.arrived_at,
        num_bypassed=request.num_bypassed,
        output=pack_int32(request.output),
        stop_at=request.stop_at,
        num_preemptions=request.num_preemptions,
        has_left_queue=request.has_left_queue,
        num_cached_tokens=request.num_cached_tokens,
        logprobs=pack_float32(request.logprobs),
    )


def _restore_request(saved: _SavedRequest, submissions: Mapping[str, Submission]) -> Request:
    submission = submissions.get(saved.request_id)
    if submission is None:
        raise UnusableSnapshot(f"no submission for request {saved.request_id}")
    return Request(
        submission=submission,
        arrival=saved.arrival,
        arrived_at=saved.arrived_at,
        num_bypassed=saved.num_bypassed,
        output=unpack_int32(saved.output),
        stop_at=saved.stop_at,
        num_preemptions=saved.num_preemptions,
        has_left_queue=saved.has_left_queue,
        num_cached_tokens=saved.num_cached_tokens,
        logprobs=unpack_float32(saved.logprobs),
    )


def _save_lane(lane: Lane) -> _SavedLane:
    return _SavedLane(
        worker=lane.worker,
        incarnation=lane.incarnation,
        index=lane.index,
        draining=lane.draining,
        broken=lane.broken,
        planned=lane.planned,
        answered=lane.answered,
        in_flight=[(plan.plan_id, plan.num_yields, plan.chunks, plan.searches) for plan in lane.in_flight],
        seats=[_save_seat(seat) for seat in lane.seats.values()],
        ghosts=[(ghost.row, ghost.first, ghost.last, ghost.dropped) for ghost in lane.ghosts.values()],
        pool=save_pool(lane.pool),
        block_bytes=lane.block_bytes,
        rates=tuple(lane.rates),
        swapped=[_save_swapped(request) for request in lane.swapped.values()],
    )


def _save_swapped(request: Request) -> tuple[str, bytes, int]:
    swapped = request.swapped
    assert swapped is not None
    return request.request_id, pack_int32(swapped.slots), swapped.num_computed


def _save_seat(seat: Seat) -> _SavedSeat:
    return _SavedSeat(
        row=seat.row,
        request_id=seat.request.request_id,
        added=seat.added,
        known=seat.known,
        blocks=pack_int32(seat.blocks),
        computed=seat.computed,
        first=seat.first,
        last=seat.last,
        num_kept=seat.num_kept,
        parent=seat.parent,
        beams=save_beams(seat.beams),
    )


def _restore_lane(saved: _SavedLane, core: SchedulerCore) -> Lane:
    lane = Lane(
        saved.worker,
        saved.incarnation,
        saved.index,
        restore_pool(saved.pool, core.config),
        core.config,
        core.policy,
        saved.block_bytes,
    )
    lane.draining, lane.broken = saved.draining, saved.broken
    lane.clock.planned, lane.answered = saved.planned, saved.answered
    lane.in_flight.extend(InFlight(*plan) for plan in saved.in_flight)
    lane.history = TokenHistory(core.config.max_num_seqs, base=saved.answered + 1)
    lane.rates = Rates(*saved.rates)
    ghosts = [Ghost(row, first, last, dropped) for row, first, last, dropped in saved.ghosts]
    lane.restore_rows([_restore_seat(seat, lane, core) for seat in saved.seats], ghosts)
    for request_id, slots, num_computed in saved.swapped:
        request = lane.swapped[request_id] = core.requests[request_id]
        request.swapped = SwappedOut(lane, list(unpack_int32(slots)), num_computed)
        request.state = RequestState.SWAPPED
    return lane


def _restore_seat(saved: _SavedSeat, lane: Lane, core: SchedulerCore) -> Seat:
    request = core.requests[saved.request_id]
    seat = Seat(
        lane=lane,
        row=saved.row,
        request=request,
        added=saved.added,
        known=saved.known,
        blocks=list(unpack_int32(saved.blocks)),
        computed=saved.computed,
        first=saved.first,
        last=saved.last,
        mark=max(saved.first, min(lane.answered, saved.last) + 1),
        num_kept=saved.num_kept,
        parent=saved.parent,
        beams=restore_beams(saved.beams, request.submission.params),
    )
    for table in (seat.blocks, *(seat.beams.tails if seat.beams else ())):
        lane.pool.adopt(table)
    request.seat = seat
    request.state = RequestState.RUNNING
    return seat
