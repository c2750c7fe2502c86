"""The whole state of the core, to bytes and back, exactly: a restored core makes the same plans, byte for byte.

Prompts are not in it; they are in the request records, which `restore` is given. What follows from the seats and the
cached blocks (decode clock, reference counts, free rows, free and idle blocks) is not in it either, and rebuilt.

A full prefix cache would be most of it, and little of that changes in a second. So the leader keeps it in parts
(`saved_pool.py`): the core without cached blocks, which it writes anew, and a part per cached block, of which it writes
those that changed. Recordings and tests have it in one piece.
"""

from collections.abc import Mapping

import msgspec

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.counters import Counters
from services.scheduler.core.known_worker import KnownWorker
from services.scheduler.core.policies.base import PolicyState
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.saved import Saved, UnusableSnapshot
from services.scheduler.core.saved_lane import SavedLane, restore_lane, save_lane
from services.scheduler.core.saved_pool import save_all_blocks, save_blocks
from services.scheduler.core.scheduler import SchedulerCore
from shared.messages import FinishReason, Submission
from shared.packing import pack_float32, pack_int32, unpack_float32, unpack_int32

FORMAT = 15
"""Rises with every change of what is saved or of what the core makes of it."""

Incarnation = tuple[str, int]
"""A worker's name and the number of its incarnation."""


class _SavedRequest(Saved, frozen=True):
    request_id: str
    arrival: int
    arrived_at: float
    num_bypassed: int
    output: bytes
    stop_at: int | None
    num_preemptions: int
    num_deaths: int
    has_left_queue: bool
    num_cached_tokens: int
    logprobs: bytes
    fingerprint: str
    num_numerics_switches: int


class SavedCore(Saved, frozen=True):
    """Everything but the cached blocks."""

    format: int
    config: dict[str, bool | int | float | str]
    policy: PolicyState
    requests: list[_SavedRequest]
    """Live ones, in the order of `SchedulerCore.requests`."""
    lanes: list[SavedLane]
    known_workers: list[tuple[str, int, int]]
    counters: tuple[int, ...]
    finished: list[int]
    """By reason, in the order of `FinishReason`."""
    ended_ids: list[str]
    num_arrivals: int
    num_joins: int
    times_passed_over: int

    @property
    def request_ids(self) -> list[str]:
        """The requests whose submissions `restore_core` needs."""
        return [saved.request_id for saved in self.requests]

    @property
    def incarnations(self) -> list[Incarnation]:
        """The worker incarnations whose cached blocks it needs."""
        return [(lane.worker, lane.incarnation) for lane in self.lanes]


class _Whole(Saved, frozen=True):
    core: bytes
    blocks: list[dict[int, bytes]]
    """By lane."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SavedCore)
_whole_decoder = msgspec.msgpack.Decoder(_Whole)


# ---------------------------------------------------------------- in one piece


def take_snapshot(core: SchedulerCore) -> bytes:
    """The state between two ticks: `take_events` and `take_finished` have been called."""
    return _encoder.encode(_Whole(save_core(core), [save_all_blocks(lane.pool) for lane in core.lanes.values()]))


def restore(data: bytes, config: SchedulerConfig, submissions: Mapping[str, Submission]) -> SchedulerCore:
    """The core that `take_snapshot` was given.

    Raises:
        UnusableSnapshot: other format or configuration, or a submission is missing.
    """
    whole = _read_whole(data)
    saved = read_core(whole.core)
    return restore_core(saved, dict(zip(saved.incarnations, whole.blocks, strict=False)), config, submissions)


def _read_whole(data: bytes) -> _Whole:
    try:
        return _whole_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableSnapshot(f"no snapshot: {error}") from error


# ---------------------------------------------------------------- in parts


def save_core(core: SchedulerCore) -> bytes:
    """The state between two ticks without the cached blocks: O(live requests)."""
    return _encoder.encode(
        SavedCore(
            format=FORMAT,
            config=_config_dict(core.config),
            policy=core.policy.save(),
            requests=[_save_request(core, request) for request in core.requests.values()],
            lanes=[save_lane(lane) for lane in core.lanes.values()],
            known_workers=[(name, known.fenced, known.num_blocks) for name, known in core.known_workers.items()],
            counters=tuple(getattr(core.counters, name) for name in Counters.__slots__),
            finished=[core.finished_by_reason[reason] for reason in FinishReason],
            ended_ids=list(core.ended_ids),
            num_arrivals=core.num_arrivals,
            num_joins=core.num_joins,
            times_passed_over=core.times_passed_over,
        )
    )


def incarnations(core: SchedulerCore) -> list[Incarnation]:
    """Of all lanes."""
    return [(lane.worker, lane.incarnation) for lane in core.lanes.values()]


def num_changed_blocks(core: SchedulerCore) -> int:
    """Parts that `save_changed_blocks` would answer."""
    return sum(lane.pool.cache.num_changed for lane in core.lanes.values())


def save_changed_blocks(core: SchedulerCore) -> dict[Incarnation, dict[int, bytes]]:
    """By incarnation and place, the parts of blocks that changed since the last call, or since the core was restored;
    empty where nothing is cached any more. An incarnation that is new has none before.
    """
    return {
        (lane.worker, lane.incarnation): save_blocks(lane.pool, lane.pool.cache.take_changed())
        for lane in core.lanes.values()
        if lane.pool.cache.num_changed
    }


def read_core(data: bytes) -> SavedCore:
    """What `save_core` made.

    Raises:
        UnusableSnapshot: the bytes are none of this format.
    """
    try:
        saved = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnusableSnapshot(f"no snapshot of format {FORMAT}: {error}") from error
    if saved.format != FORMAT:
        raise UnusableSnapshot(f"snapshot of format {saved.format}, not {FORMAT}")
    return saved


def restore_core(
    saved: SavedCore,
    blocks: Mapping[Incarnation, Mapping[int, bytes]],
    config: SchedulerConfig,
    submissions: Mapping[str, Submission],
) -> SchedulerCore:
    """The core that was saved, with the parts of its cached blocks.

    Raises:
        UnusableSnapshot: other configuration, or a submission or a block is missing.
    """
    core = SchedulerCore(config)
    if saved.config != _config_dict(config):
        raise UnusableSnapshot("the snapshot was taken under another configuration")
    for saved_request in saved.requests:
        request = core.requests[saved_request.request_id] = _restore_request(saved_request, submissions)
        core.groups.add(request)
        core.policy.on_live(request)
    for incarnation, saved_lane in zip(saved.incarnations, saved.lanes, strict=True):
        core.lanes[saved_lane.worker] = restore_lane(saved_lane, blocks.get(incarnation, {}), core)
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
        num_deaths=request.num_deaths,
        has_left_queue=request.has_left_queue,
        num_cached_tokens=request.num_cached_tokens,
        logprobs=pack_float32(request.logprobs),
        fingerprint=request.fingerprint,
        num_numerics_switches=request.num_numerics_switches,
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
        num_deaths=saved.num_deaths,
        has_left_queue=saved.has_left_queue,
        num_cached_tokens=saved.num_cached_tokens,
        logprobs=unpack_float32(saved.logprobs),
        fingerprint=saved.fingerprint,
        num_numerics_switches=saved.num_numerics_switches,
    )
