"""One usage record for every ending; `Pool.check_texts` checks it wherever schedulers and workers die."""

from shared.messages import Abort, Decoder, FinishReason, Stop, Submit, UsageRecord
from shared.streams import scan
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
