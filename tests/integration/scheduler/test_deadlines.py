"""Deadlines stop the work itself (cases 90 and 91): in the queue, before the first token, while it runs."""

import time

import msgspec

from shared.messages import FinishReason
from tests.fakes.scheduler_world import make_submission
from tests.integration.scheduler.conftest import Pool, wait_for


def submit_due(pool: Pool, *deadlines: float, max_tokens: int = 200) -> str:
    """One request with deadlines (queue, first token, total); its id."""
    request_id = f"d{len(pool.submissions)}"
    submission = make_submission(request_id, [1, 2, 3], max_tokens=max_tokens, min_tokens=max_tokens)
    submission = msgspec.structs.replace(submission, created=time.time(), deadlines=deadlines)
    pool.submit_these(submission)
    return request_id


def ending(pool: Pool, request_id: str) -> tuple[FinishReason, str, int]:
    final = pool.record(request_id).final
    assert final is not None
    return final.reason, final.message, final.num_output_tokens


def test_a_request_that_waits_too_long_is_never_scheduled(pool: Pool) -> None:
    """No worker; then one comes, and finds only the request that may wait."""
    scheduler = pool.scheduler().start()
    late = submit_due(pool, 0.4, 0, 0)
    patient = submit_due(pool, 30, 0, 0, max_tokens=5)
    started = time.monotonic()
    wait_for(lambda: pool.has_ended(late))
    assert 0.3 < time.monotonic() - started < 1.5
    assert ending(pool, late) == (FinishReason.TIMEOUT, "queue_deadline", 0)
    pool.worker()
    wait_for(lambda: pool.has_ended(patient))
    assert ending(pool, patient)[0] is FinishReason.LENGTH
    assert scheduler.leader is not None and not scheduler.leader.position.core.requests
    pool.check_usage()


def test_the_first_token_and_the_whole_have_deadlines_too(pool: Pool) -> None:
    scheduler = pool.scheduler().start()
    worker = pool.worker(step_s=0.02)
    in_time = submit_due(pool, 10, 10, 10, max_tokens=5)
    long = submit_due(pool, 10, 10, 0.6)
    wait_for(lambda: pool.has_ended(long) and pool.has_ended(in_time))
    reason, message, num_tokens = ending(pool, long)
    assert (reason, message) == (FinishReason.TIMEOUT, "deadline") and 0 < num_tokens < 200
    assert ending(pool, in_time)[0] is FinishReason.LENGTH
    worker._step_s = 4.0  # it is admitted, but nothing comes
    slow = submit_due(pool, 0, 0.4, 0)
    wait_for(lambda: pool.has_ended(slow))
    assert ending(pool, slow) == (FinishReason.TIMEOUT, "first_token_deadline", 0)
    leader = scheduler.leader
    assert leader is not None
    wait_for(lambda: not any(lane.seats for lane in leader.position.core.lanes.values()))
    pool.check_usage()


def test_a_successor_knows_the_deadlines(pool: Pool) -> None:
    first = pool.scheduler().start()
    late = submit_due(pool, 1.2, 0, 0)
    wait_for(lambda: first.leader is not None and late in first.leader.position.core.requests)
    first.crash()
    pool.scheduler().start()
    wait_for(lambda: pool.has_ended(late))
    assert ending(pool, late)[:2] == (FinishReason.TIMEOUT, "queue_deadline")
