"""A request's life in the core: admission, endings, rejections."""

from typing import Any

import pytest

from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.request import TRANSITIONS, IllegalTransition, Request, RequestState, Signal
from services.scheduler.core.scheduler import SchedulerCore
from shared.errors import ConfigError
from shared.messages import EndReason, EventKind, FinishReason, WorkerDraining, WorkerJoined
from shared.packing import unpack_int32
from tests.fakes.content_worker import reference_output
from tests.fakes.scheduler_world import World, make_submission


def make_core(**config: Any) -> SchedulerCore:
    return SchedulerCore(SchedulerConfig(**{"max_model_len": 100, "block_size": 4, **config}))


def test_a_signal_that_the_state_does_not_know_is_named() -> None:
    request = Request(make_submission("r", [1], max_tokens=1), arrival=0)
    with pytest.raises(IllegalTransition, match=r"request r: no transition for \(waiting, preempt\)"):
        request.apply(Signal.PREEMPT)
    assert request.state is RequestState.WAITING


def test_nothing_follows_the_end() -> None:
    assert not [signal for state, signal in TRANSITIONS if state is RequestState.FINISHED]


@pytest.mark.parametrize(
    "bad", [{"block_size": 0}, {"plan_ahead": 3}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 0}]
)
def test_a_configuration_that_cannot_work_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        make_core(**bad)


def test_a_request_longer_than_the_context_is_rejected_with_both_numbers() -> None:
    core = make_core(max_model_len=50)
    core.add_request(make_submission("r", [1] * 30, max_tokens=21))
    (event,) = core.take_events()
    (finished,) = core.take_finished()
    assert (event.kind, event.reason) == (EventKind.FINISHED, FinishReason.REJECTED)
    assert finished.final.message == event.message
    assert "30" in event.message
    assert "51 tokens, but max_model_len holds 50" in event.message
    assert core.is_idle


def test_a_request_that_fits_no_pool_is_rejected_when_that_is_known() -> None:
    core = make_core()
    core.add_request(make_submission("r", [1] * 30, max_tokens=20))
    assert not core.take_events()
    core.on_worker_joined(WorkerJoined("w", 1, 12))
    (event,) = core.take_events()
    assert "50 tokens, but the KV cache of the largest worker holds 48" in event.message
    assert core.largest_request_tokens() == 48


def test_a_request_that_fills_the_pool_exactly_runs_to_its_end() -> None:
    world = World(SchedulerConfig(max_model_len=100, block_size=4))
    world.join("w", 12)
    world.submit(make_submission("r", [1] * 28, max_tokens=20, ignore_eos=True))
    world.settle()
    world.judge_idle()
    assert len(world.readers["r"].tokens) == 20


def test_a_request_waits_for_a_worker_that_died_but_not_for_one_that_drained() -> None:
    core = make_core()
    core.on_worker_joined(WorkerJoined("small", 1, 5))
    core.on_worker_joined(WorkerJoined("large", 1, 20))
    core.on_worker_lost("large", 1)
    core.add_request(make_submission("big", [1] * 30, max_tokens=10))
    core.add_request(make_submission("fits", [1] * 3, max_tokens=10))
    plan = core.schedule(0.0)
    assert plan is not None
    assert [new.request_id for new in plan.plan.added] == ["fits"], "it must not block those that fit"
    assert {d.request_id: d.reason for d in core.diagnostics()} == {"fits": "", "big": "larger_worker"}
    core.on_worker_joined(WorkerJoined("large", 2, 20))
    core.on_worker_draining(WorkerDraining("large", 2))
    core.on_worker_lost("large", 2)
    (event,) = core.take_events()
    assert (event.request_id, event.reason) == ("big", FinishReason.REJECTED)


def test_an_abort_ends_a_request_wherever_it_is() -> None:
    world = World(SchedulerConfig(max_model_len=100, block_size=4, max_num_seqs=2, max_num_batched_tokens=8))
    world.join("w", 20)
    for name in ("decoding", "prefilling", "waiting"):
        world.submit(make_submission(name, [1] * (4 if name == "decoding" else 20), max_tokens=30, ignore_eos=True))
    for _ in range(2):
        world.turn()
        world.step("w")
    states = {d.request_id: (d.state, d.num_output_tokens) for d in world.core.diagnostics()}
    assert states["decoding"][1] > 0
    assert states["prefilling"] == (RequestState.RUNNING, 0)
    assert states["waiting"] == (RequestState.WAITING, 0)
    for name in states:
        world.abort(name)
    world.settle()
    world.judge_idle()
    assert {reader.terminal.reason for reader in world.readers.values() if reader.terminal} == {"abort"}
    assert len(world.readers["decoding"].tokens) < 6, "the worker went on with it"


def test_a_stop_cuts_the_output_where_the_stop_string_completed() -> None:
    world = World(SchedulerConfig(max_model_len=100))
    world.join("w", 20)
    submission = make_submission("r", [1, 2, 3], max_tokens=40, ignore_eos=True)
    world.submit(submission)
    for _ in range(8):
        world.turn()
        world.step("w")
    world.stop("r", 5)
    world.turn()
    (end,) = [e for e in world.ended if e.request_id == "r"]
    assert end.final.reason is FinishReason.STOP
    assert list(unpack_int32(end.output)) == reference_output(submission)[0][:5]
    world.settle()
    world.judge_idle()


def test_a_stop_ahead_of_the_log_waits_for_its_token() -> None:
    world = World(SchedulerConfig(max_model_len=100))
    world.join("w", 20)
    world.submit(make_submission("r", [1, 2, 3], max_tokens=40, ignore_eos=True))
    world.stop("r", 6)
    world.turn()
    assert not world.ended
    world.settle()
    world.judge_idle()
    assert world.ended[0].final.num_output_tokens == 6
    assert world.ended[0].final.reason is FinishReason.STOP


def test_a_stop_string_wins_over_a_later_end_by_length() -> None:
    world = World(SchedulerConfig(max_model_len=100))
    world.join("w", 20)
    world.submit(make_submission("r", [1, 2, 3], max_tokens=4, ignore_eos=True))
    world.stop("r", 4)
    world.settle()
    assert world.ended[0].final.reason is FinishReason.STOP


def test_a_row_that_the_worker_cannot_compute_ends_alone() -> None:
    world = World(SchedulerConfig(max_model_len=100))
    world.join("w", 20)
    for name in ("good", "bad"):
        world.submit(make_submission(name, [1, 2, 3], max_tokens=10, ignore_eos=True))
    for _ in range(4):
        world.turn()
        world.step("w")
    world.fail("bad")
    world.settle()
    world.judge_idle()
    ends = {end.request_id: end.final for end in world.ended}
    assert ends["bad"].reason is FinishReason.ERROR
    assert ends["bad"].end_reason == EndReason.ERROR
    assert 0 < ends["bad"].num_output_tokens < 10
    assert ends["good"].reason is FinishReason.LENGTH


def test_a_recovered_request_continues_after_its_committed_tokens() -> None:
    submission = make_submission("r", [1, 2, 3], max_tokens=10, ignore_eos=True)
    reference, _ = reference_output(submission)
    core = make_core()
    core.add_request(submission, reference[:6])
    core.on_worker_joined(WorkerJoined("w", 1, 20))
    plan = core.schedule(0.0)
    assert plan is not None
    (new,) = plan.plan.added
    assert list(unpack_int32(new.tokens)) == [1, 2, 3, *reference[:6]]
    assert new.num_prompt_tokens == 3
    assert plan.plan.chunks == ((0, 9),)


@pytest.mark.parametrize(
    ("num_output", "end_reason", "expected"),
    [(10, None, FinishReason.LENGTH), (4, EndReason.EOS, FinishReason.STOP)],
)
def test_a_recovered_request_that_had_ended_ends(
    num_output: int, end_reason: EndReason | None, expected: FinishReason
) -> None:
    core = make_core()
    core.add_request(make_submission("r", [1, 2], max_tokens=10), [5] * num_output, end_reason)
    (finished,) = core.take_finished()
    assert (finished.final.reason, finished.final.num_output_tokens) == (expected, num_output)


def test_the_queue_counters_count_each_request_once() -> None:
    world = World(SchedulerConfig(max_model_len=100, block_size=4))
    world.join("w", 12)
    for name, size in (("a", 3), ("b", 5), ("never", 200)):
        world.submit(make_submission(name, [1] * size, max_tokens=10, ignore_eos=True))
    world.turn()
    stats = world.core.stats()
    assert (stats.left_requests, stats.left_tokens) == (3, 208)
    world.join("w", 12)
    world.settle()
    stats = world.core.stats()
    assert stats.num_requeues == 2
    assert (stats.left_requests, stats.left_tokens) == (3, 208)
