"""Results and worker events that are late, doubled, unknown or wrong: ignored and counted (cases 12 and 13)."""

import msgspec
import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.core.snapshot import take_snapshot
from services.scheduler.core.ticks import apply_tick
from shared.messages import (
    Abort,
    EndReason,
    IntakeMessage,
    LogMessage,
    ProcessDied,
    StepResult,
    Stop,
    Submit,
    Tick,
    TickEntry,
    WorkerDraining,
    WorkerFenced,
    WorkerJoined,
)
from shared.packing import pack_int32
from tests.fakes.scheduler_world import World, make_submission


def decoding_core() -> SchedulerCore:
    """Two rows that decode, plan 2 in flight on `w` (incarnation 3)."""
    core = SchedulerCore(SchedulerConfig(max_model_len=100, plan_ahead=1))
    core.on_worker_joined(WorkerJoined("w", 3, 20))
    for name in ("a", "b"):
        core.add_request(make_submission(name, [1, 2], max_tokens=9))
    core.schedule(0.0)
    core.update_from_result(StepResult("w", 3, 1, pack_int32([7, 8])))
    core.schedule(0.0)
    return core


GOOD = StepResult("w", 3, 2, pack_int32([9, 9]))


@pytest.mark.parametrize(
    "change",
    [
        {"worker": "stranger"},
        {"incarnation": 2},
        {"incarnation": 4},
        {"step_id": 1},
    ],
)
def test_a_result_of_another_step_or_incarnation_is_ignored_and_counted(change: dict[str, object]) -> None:
    core = decoding_core()
    before = take_snapshot(core)
    core.update_from_result(msgspec.structs.replace(GOOD, **change))
    assert core.stats().num_ignored_messages == 1
    core.counters.ignored = 0
    assert take_snapshot(core) == before
    core.update_from_result(GOOD)
    assert [len(output.output) // 4 for output in core.live_outputs()] == [2, 2]


def test_a_doubled_result_counts_once() -> None:
    core = decoding_core()
    core.update_from_result(GOOD)
    core.update_from_result(GOOD)
    assert core.stats().num_ignored_messages == 1
    assert [len(output.output) // 4 for output in core.live_outputs()] == [2, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": pack_int32([9])},
        {"tokens": pack_int32([9, 9, 9])},
        {"tokens": b"\1\2\3"},
        {"tokens": pack_int32([9, -2])},
        {"tokens": pack_int32([-256, 511])},
        {"tokens": pack_int32([-(2**31), 9])},
        {"tokens": pack_int32([9] * 200)},
        {"logprobs": ((0, -1.0), (0, -1.0))},
        {"logprobs": ((0, float("nan")),)},
        {"ended": ((5, EndReason.EOS),)},
        {"ended": ((0, 77),)},
        {"ended": ((0, EndReason.EOS), (0, EndReason.EOS))},
        {"step_id": 3},
    ],
)
def test_a_result_against_its_plan_marks_the_worker_as_broken(change: dict[str, object]) -> None:
    core = decoding_core()
    core.update_from_result(msgspec.structs.replace(GOOD, **change))
    assert core.broken_workers() == [("w", 3)]
    assert core.schedule(0.0) is None
    core.update_from_result(GOOD)
    assert core.stats().num_ignored_messages == 2
    core.check_integrity()
    core.on_worker_lost("w", 3)
    assert core.stats().num_waiting == 2
    assert [output.output for output in core.live_outputs()] == [pack_int32([7]), pack_int32([8])]


def test_a_worker_that_forgets_a_length_ending_is_broken() -> None:
    core = SchedulerCore(SchedulerConfig(max_model_len=100, plan_ahead=1))
    core.on_worker_joined(WorkerJoined("w", 1, 20))
    core.add_request(make_submission("a", [1, 2], max_tokens=1))
    core.schedule(0.0)
    core.update_from_result(StepResult("w", 1, 1, pack_int32([7])))
    assert core.broken_workers() == [("w", 1)]


def test_a_worker_whose_result_is_missing_is_broken_and_its_requests_go_on_from_what_is_there() -> None:
    """An entry of the log that cannot be read: without its tokens, no later one of the worker has a place."""
    world = World(SchedulerConfig(max_model_len=100))
    world.join("w", 20)
    for name in ("a", "b"):
        world.submit(make_submission(name, [1, 2], max_tokens=9, ignore_eos=True))
    world.turn()
    world.step("w")
    world.turn()
    assert world.lose("w")
    world.turn()
    assert not world.workers, "it is fenced"
    world.turn()
    assert world.core.stats().num_requeues == 2
    world.join("w", 20)
    world.settle()
    world.judge_idle()


def test_no_token_is_told_from_tokens_at_any_alignment() -> None:
    """Token ids whose bytes are mostly 0xff, beside rows that yield nothing."""
    core = SchedulerCore(SchedulerConfig(max_model_len=100, plan_ahead=1))
    core.on_worker_joined(WorkerJoined("w", 1, 20))
    for name in ("a", "b", "c"):
        core.add_request(make_submission(name, [1, 2], max_tokens=9))
    core.schedule(0.0)
    large = 0x00FFFFFF
    core.update_from_result(StepResult("w", 1, 1, pack_int32([large] * 3), ended=((1, EndReason.EOS),)))
    core.schedule(0.0)
    core.update_from_result(StepResult("w", 1, 2, pack_int32([large, -1, 0x7FFFFFFF])))
    assert not core.broken_workers()
    assert core.stats().num_ignored_messages == 0


def test_messages_for_unknown_and_finished_ids_are_ignored_and_counted() -> None:
    core = SchedulerCore(SchedulerConfig(max_model_len=100))
    submission = make_submission("r", [1], max_tokens=5)
    tick = Tick(1, "1-0", "1-0", 0.0, (WorkerDraining("nobody", 1),))
    intake: list[IntakeMessage] = [
        Submit("r"),
        Submit("r"),
        Abort("r", "cancelled"),
        Abort("r", "cancelled"),
        Submit("r"),
        Stop("x", 1),
    ]
    outcome = apply_tick(core, tick, [], [*intake, Submit("lost"), ProcessDied("x")], {"r": submission})
    assert [event.request_id for event in outcome.events] == ["r"]
    # Doubled submit, doubled abort, submit after the end, stranger's stop, submit without record, stranger's drain.
    assert core.stats().num_ignored_messages == 6
    assert core.is_idle


def test_a_tick_takes_the_log_before_intake_and_intake_before_events() -> None:
    """A stop that refers to a token in the same tick's log finds it; a worker that joins sees what intake brought."""
    world = World(SchedulerConfig(max_model_len=100, plan_ahead=1))
    core = world.core
    submissions = {name: make_submission(name, [1, 2], max_tokens=9) for name in ("a", "b")}
    joined = Tick(1, "1-0", "0-0", 0.0, (WorkerJoined("w", 1, 20),))
    first = apply_tick(core, joined, [], [Submit("a")], submissions)
    assert first.plan is not None
    assert first.plan.plan.tick == joined
    assert [new.request_id for new in first.plan.plan.added] == ["a"]
    log: list[LogMessage] = [TickEntry(joined), StepResult("w", 1, 1, pack_int32([7]))]
    second = apply_tick(core, Tick(2, "2-0", "2-0", 0.1), log, [Stop("a", 1), Submit("b")], submissions)
    assert [(end.request_id, end.output) for end in second.finished] == [("a", pack_int32([7]))]
    assert second.plan is not None
    assert second.plan.plan.dropped == (0,)
    assert [new.row for new in second.plan.plan.added] == [1]


def test_a_fenced_worker_hands_its_requests_back_with_their_tokens() -> None:
    core = decoding_core()
    core.update_from_result(GOOD)
    core.schedule(0.0)
    tick = Tick(9, "9-0", "9-0", 0.0, (WorkerJoined("w", 4, 20),))
    late = StepResult("w", 3, 3, pack_int32([1, 1]))
    outcome = apply_tick(core, tick, [WorkerFenced("w", 3), late], [], {})
    assert core.stats().num_requeues == 2
    assert core.stats().num_ignored_messages == 1
    assert outcome.plan is not None
    assert (outcome.plan.incarnation, outcome.plan.plan.plan_id) == (4, 1)
    assert [new.tokens for new in outcome.plan.plan.added] == [pack_int32([1, 2, 7, 9]), pack_int32([1, 2, 8, 9])]


def test_an_incarnation_that_is_fenced_cannot_join() -> None:
    core = SchedulerCore(SchedulerConfig(max_model_len=100))
    core.on_worker_lost("w", 5)
    core.on_worker_joined(WorkerJoined("w", 5, 20))
    assert (core.stats().num_workers, core.stats().num_ignored_messages) == (0, 1)
    core.on_worker_joined(WorkerJoined("w", 6, 20))
    assert core.stats().num_workers == 1
