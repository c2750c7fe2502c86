"""One usage record for every ending; `Pool.check_texts` checks it wherever schedulers and workers die."""

from services.scheduler.core.cost_model import Preemption
from services.scheduler.core.request import RequestState
from shared.messages import DEADLINE_CAUSES, Abort, Decoder, FinishReason, Stop, Submit, UsageRecord
from shared.streams import scan
from tests.fakes.scheduler_world import make_submission
from tests.integration.scheduler.conftest import Pool, wait_for


def usages(pool: Pool) -> dict[str, UsageRecord]:
    decoder: Decoder[UsageRecord] = Decoder(UsageRecord)
    return {u.request_id: u for u in (decoder.decode(payload) for _, payload in scan(pool.client, pool.keys.usage))}


def test_aborted_and_stopped_requests_are_accounted_for_once(pool: Pool) -> None:
    scheduler = pool.scheduler()
    leader = scheduler.take_over()
    worker = pool.worker(step_s=0.002)
    pool.submit(4, max_tokens=200)
    wait_for(lambda: leader.turn(0.02) is not None and pool.steps() > 40)
    for message in (
        Abort("r0", "client_disconnect"),
        Stop("r1", 5),
        Abort("r2", "cancelled"),
        Abort("r2", "cancelled"),
    ):
        pool.send(message)
    pool.send(Stop("r1", 5))
    pool.send(Abort("never-submitted", "client_disconnect"))
    pool.send(Submit("r0"))  # as if its reply had been lost
    wait_for(lambda: leader.turn(0.02) is not None and all(map(pool.has_ended, pool.submissions)))
    pool.check_usage()
    found = usages(pool)
    assert [found[i].reason for i in ("r0", "r1", "r2")] == [FinishReason.ABORT, FinishReason.STOP, FinishReason.ABORT]
    assert (found["r0"].cause, found["r1"].cause, found["r2"].cause) == ("client_disconnect", "", "cancelled")
    assert found["r1"].num_output_tokens == 5 < found["r1"].num_generated_tokens
    assert found["r0"].num_output_tokens > 0
    assert worker.error is None


def test_a_request_that_never_ran_is_accounted_for(pool: Pool) -> None:
    """No worker: aborted while it waits."""
    leader = pool.scheduler().take_over()
    pool.submit(2)
    leader.run_until_idle()
    pool.send(Abort("r0", "window_expired"))
    leader.run_until_idle()
    pool.check_usage()
    (usage,) = usages(pool).values()
    assert (usage.request_id, usage.num_output_tokens, usage.num_generated_tokens) == ("r0", 0, 0)


def test_a_request_that_left_while_it_was_swapped_out_is_accounted_for(pool: Pool) -> None:
    """Blocks for about two of four; the others wait in main memory for their turn."""
    leader = pool.scheduler(preemption=Preemption.SWAP).take_over()
    pool.worker(step_s=0.002, num_blocks=30, num_cpu_blocks=100)
    pool.submit_these(
        *(make_submission(f"r{n}", [1 + n] * 12, max_tokens=80, min_tokens=80, ignore_eos=True) for n in range(4))
    )
    core = leader.position.core

    found: list[str] = []

    def look() -> bool:
        leader.turn(0.02)
        found[:] = [r.request_id for r in core.requests.values() if r.state is RequestState.SWAPPED]
        return bool(found)

    wait_for(look)
    gone = found[0]
    pool.send(Abort(gone, "client_disconnect"))
    wait_for(lambda: leader.turn(0.02) is not None and pool.has_ended(gone))
    assert usages(pool)[gone].reason is FinishReason.ABORT and usages(pool)[gone].num_output_tokens > 0
    wait_for(lambda: leader.turn(0.02) is not None and all(map(pool.has_ended, pool.submissions)))
    pool.check_usage()
    assert core.counters.swap_outs > 0 and not core.requests


def test_every_kind_of_ending_has_one_record(pool: Pool) -> None:
    leader = pool.scheduler().take_over()
    pool.worker(step_s=0.002, num_blocks=32)
    expected = {
        "length": FinishReason.LENGTH,
        "token": FinishReason.STOP,
        "string": FinishReason.STOP,
        "left": FinishReason.ABORT,
        "window": FinishReason.ABORT,
        "late": FinishReason.TIMEOUT,
        "large": FinishReason.REJECTED,
    }
    pool.submit_these(
        make_submission("length", [1, 2, 3], max_tokens=6, min_tokens=6),
        make_submission("token", [4, 5, 6], max_tokens=20, stop_token_ids=tuple(range(64))),
        *(
            make_submission(name, [7, 8, 9], max_tokens=90, min_tokens=90)
            for name in ("string", "left", "window", "late")
        ),
        make_submission("large", [1] * 200, max_tokens=40),
    )
    leader.turn(0.02)
    for message in (
        Stop("string", 1),
        Abort("left", "client_disconnect"),
        Abort("window", "window_expired"),
        Abort("late", DEADLINE_CAUSES[-1]),
    ):
        pool.send(message)
    wait_for(lambda: leader.turn(0.02) is not None and all(map(pool.has_ended, pool.submissions)))
    pool.check_usage()
    assert {request_id: usage.reason for request_id, usage in usages(pool).items()} == expected
