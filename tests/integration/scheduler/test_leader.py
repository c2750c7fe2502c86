"""The leader with workers on a real Redis: from submission to final record, and what that costs."""

import time
from typing import Any

from shared.limits import read_limits
from shared.messages import (
    FIELD,
    Abort,
    Decoder,
    FinishReason,
    LogMessage,
    PoolStats,
    StepPlan,
    StepResult,
    Stop,
    Submit,
    TickEntry,
)
from shared.streams import scan
from tests.fakes.content_worker import reference_output
from tests.integration.scheduler.conftest import Pool, wait_for

_log: Decoder[LogMessage] = Decoder(LogMessage)
_plans: Decoder[StepPlan] = Decoder(StepPlan)
_stats: Decoder[PoolStats] = Decoder(PoolStats)


def _stats_of(pool: Pool) -> PoolStats:
    data: Any = pool.client.get(pool.keys.stats)
    return _stats.decode(data)


def test_requests_run_to_their_final_records(pool: Pool) -> None:
    pool.worker()
    pool.scheduler().start()
    pool.submit(12)
    pool.wait_until_ended()
    pool.check_texts()
    for request_id in pool.submissions:
        assert 0 < pool.client.ttl(pool.keys.request(request_id)) <= 3600


def test_two_workers_share_the_requests_and_everything_is_free_afterwards(pool: Pool) -> None:
    workers = [pool.worker("worker-0", step_s=0.002), pool.worker("worker-1", step_s=0.002)]
    scheduler = pool.scheduler().start()
    wait_for(lambda: scheduler.leader is not None and len(scheduler.leader.position.core.lanes) == 2)
    pool.submit(24)
    pool.wait_until_ended()
    pool.check_texts()
    assert all(len(worker.statuses) > 20 for worker in workers)
    wait_for(lambda: _stats_of(pool).num_requests_running == 0 and _stats_of(pool).finished[0][1] > 0)
    stats = _stats_of(pool)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks == 128
    assert sum(number for _, number in stats.finished) == 24
    limits = read_limits(pool.client, pool.keys)
    assert limits.submitted == limits.left == 24
    assert limits.submitted_tokens == limits.left_tokens
    assert limits.max_request_tokens == limits.max_model_len == 256


def test_what_was_cached_is_told_in_log_record_and_stats(pool: Pool) -> None:
    pool.worker()
    pool.scheduler().start()
    prefix = [1 + position % 20 for position in range(22)]
    first = pool.submit(1, prefix=prefix)
    pool.wait_until_ended()
    pool.submit(6, prefix=prefix)
    pool.wait_until_ended()
    pool.check_texts()
    told = pool.told_cached()
    assert first[0] not in told and len(told) == 6
    assert all(number >= 20 for number in told.values())
    for request_id in pool.submissions:
        final = pool.record(request_id).final
        assert final is not None and final.num_cached_tokens == told.get(request_id, 0)
    wait_for(lambda: _stats_of(pool).prefix_cache_hits >= 120)
    assert _stats_of(pool).prefix_cache_queries >= 7 * 22


def test_a_pool_too_small_preempts_and_keeps_every_text(pool: Pool) -> None:
    pool.worker(num_blocks=20)
    scheduler = pool.scheduler().start()
    pool.submit(16, max_prompt=30, max_tokens=44)
    pool.wait_until_ended()
    pool.check_texts()
    assert scheduler.leader is not None
    assert scheduler.leader.position.core.counters.preemptions >= 3


def test_requests_wait_for_the_first_worker_and_what_never_fits_is_refused(pool: Pool) -> None:
    pool.scheduler().start()
    pool.submit(2, max_prompt=10, max_tokens=10)
    large = pool.submit(1, min_prompt=60, max_prompt=60, max_tokens=80)[0]
    wait_for(lambda: bool(pool.client.exists(pool.keys.stats)) and _stats_of(pool).num_requests_waiting == 3)
    assert read_limits(pool.client, pool.keys).max_request_tokens == 0
    pool.worker(num_blocks=16)
    pool.wait_until_ended()
    final = pool.record(large).final
    assert final is not None and final.reason is FinishReason.REJECTED and final.message
    wait_for(lambda: read_limits(pool.client, pool.keys).max_request_tokens == 64)
    limits = read_limits(pool.client, pool.keys)
    assert (limits.max_rows, limits.max_blocks, limits.block_size) == (8, 16, 4)
    del pool.submissions[large]
    pool.check_texts()


def test_stop_and_abort_end_requests_early(pool: Pool) -> None:
    pool.worker(step_s=0.005)
    pool.scheduler().start()
    stopped, aborted = pool.submit(2, min_prompt=4, max_prompt=8, max_tokens=120)
    pool.send(Stop(stopped, 5))
    wait_for(lambda: pool.steps() > 10)
    pool.send(Abort(aborted, "client_disconnect"))
    pool.wait_until_ended()
    record = pool.record(stopped)
    assert record.final is not None and record.final.reason is FinishReason.STOP
    assert list(record.output) == reference_output(pool.submissions[stopped])[0][:5]
    record = pool.record(aborted)
    assert record.final is not None and record.final.reason is FinishReason.ABORT
    assert list(record.output) == reference_output(pool.submissions[aborted])[0][: len(record.output)]


def test_the_log_is_cheap(pool: Pool) -> None:
    """32 requests at once: at most 2 stream writes per step and 4 per request; plans of steady decode stay small."""
    pool.worker(num_blocks=512, max_num_seqs=32, max_tokens=64, step_s=0.004)
    pool.scheduler(max_num_seqs=32, max_num_batched_tokens=64).start()
    wait_for(lambda: bool(pool.client.exists(pool.keys.stats)) and _stats_of(pool).num_workers == 1)
    pool.client.config_resetstat()
    pool.submit(32, min_prompt=8, max_prompt=24, max_tokens=100)
    pool.wait_until_ended()
    pool.check_texts()
    num_steps = sum(isinstance(_log.decode(entry.payload), StepResult) for entry in scan(pool.client, pool.keys.steps))
    num_writes = _calls(pool, "xadd")
    plans = [entry.payload for entry in scan(pool.client, pool.keys.plans("worker-0", 1))]
    steady = [p for p in plans if not ((plan := _plans.decode(p)).added or plan.chunks)]
    mean_size = sum(map(len, steady)) / len(steady)
    mean_blocks = sum(len(_plans.decode(plan).blocks) / 8 for plan in steady) / len(steady)
    print(f"{num_steps} steps, {num_writes} XADD, steady plan {mean_size:.0f} bytes with {mean_blocks:.1f} blocks")
    assert num_steps > 80 and len(steady) > 20
    assert num_writes <= 2 * num_steps + 4 * 32
    assert mean_size <= 200 + 8 * mean_blocks
    # Evaluations: the worker's and the leader's, and 32 submissions; nothing per token.
    assert _calls(pool, "evalsha") <= 2 * num_steps + 4 * 32


def _calls(pool: Pool, command: str) -> int:
    stats: Any = pool.client.info("commandstats")
    return int(stats[f"cmdstat_{command}"]["calls"])


def test_an_idle_pool_writes_no_ticks(pool: Pool) -> None:
    pool.worker()
    scheduler = pool.scheduler(fold_interval_s=0.2).start()
    pool.submit(1)
    pool.wait_until_ended()
    time.sleep(1.0)  # the last snapshot and fold
    assert scheduler.leader is not None
    tick, length = scheduler.leader.position.tick, pool.steps()
    time.sleep(0.6)
    assert (scheduler.leader.position.tick, pool.steps()) == (tick, length)


def test_intake_is_held_while_all_plans_are_in_flight(pool: Pool) -> None:
    """Submissions that come while a step runs make no ticks of their own."""
    worker = pool.worker(step_s=0.1)
    scheduler = pool.scheduler().start()
    pool.submit(1, min_prompt=8, max_prompt=8, max_tokens=40)
    wait_for(lambda: len(worker.statuses) >= 2)
    leader = scheduler.leader
    assert leader is not None
    tick, answered = leader.position.tick, len(worker.statuses)
    for _ in range(6):
        pool.submit(1, max_prompt=4, max_tokens=4)
    num_ticks, num_steps = leader.position.tick - tick, len(worker.statuses) - answered
    assert num_ticks <= num_steps + 2
    pool.wait_until_ended()
    pool.check_texts()


def test_unreadable_messages_are_kept_aside_and_harm_nobody(pool: Pool) -> None:
    pool.worker(step_s=0.002)
    scheduler = pool.scheduler().start()
    wait_for(lambda: scheduler.leader is not None)  # a cold start would pass over the poison
    pool.submit(4)
    poison = [
        b"",
        b"\x00",
        b"\xc1" * 40,
        b"\x93\xa6step/1",
        b"\x92\xa8submit/9\xa1x",
        b"\x92\xa8submit/1\x07",
        b"\x91" * 5000,
    ]
    for payload in poison:
        for stream in (pool.keys.intake, pool.keys.steps):
            pool.client.xadd(stream, {FIELD: payload})
    pool.client.xadd(pool.keys.intake, {b"other": b"field"})
    pool.submit(4)
    pool.wait_until_ended()
    pool.check_texts()
    assert scheduler.leader is not None
    assert pool.client.xlen(f"{pool.keys.intake}:dead") == len(poison) + 1
    assert pool.client.xlen(f"{pool.keys.steps}:dead") == len(poison)
    wait_for(lambda: _stats_of(pool).num_ignored_messages >= 2 * len(poison) + 1)


def test_a_submit_without_a_sound_record_is_ignored(pool: Pool) -> None:
    pool.worker()
    scheduler = pool.scheduler().start()
    wait_for(lambda: scheduler.leader is not None)  # a cold start would pass over all of this
    for payload in (b"\x92\xa8submit/1\xa7missing", b"\x92\xa8submit/1\xa3odd"):
        pool.client.xadd(pool.keys.intake, {FIELD: payload})
    pool.client.hset(pool.keys.request("odd"), "submission", b"\x00\x01")
    pool.client.set(pool.keys.request("string"), "not even a hash")  # the leader asked for it again and again
    pool.send(Submit("string"))
    pool.submit(2)
    pool.wait_until_ended()
    pool.check_texts()


def test_events_of_the_scheduler_are_in_the_log(pool: Pool) -> None:
    pool.worker()
    pool.scheduler().start()
    pool.submit(3)
    pool.wait_until_ended()
    messages = [_log.decode(entry.payload) for entry in scan(pool.client, pool.keys.steps)]
    ended = [e.request_id for m in messages if isinstance(m, TickEntry) for e in m.events]
    assert sorted(ended) == sorted(pool.submissions)
