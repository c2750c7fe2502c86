"""Folding and trimming: the streams stay short, and whatever is cut, record + log is the whole output."""

import time

import pytest

from services.scheduler.service import chores
from services.scheduler.service.trimmer import Incarnation, Saved, Trimmer
from shared.keys import Keys
from shared.messages import Decoder, LogMessage, StepPlan, StepResult
from shared.records import Seat
from shared.redis_client import connect
from shared.step_log import StepLogFollower
from shared.streams import scan
from tests.fakes.content_worker import reference_output
from tests.integration.scheduler.conftest import Pool, wait_for

_log: Decoder[LogMessage] = Decoder(LogMessage)
_plan: Decoder[StepPlan] = Decoder(StepPlan)
SHORT = {"log_keep_s": 0.0, "log_keep_bytes": 0, "fold_interval_s": 0.2, "snapshot_interval_s": 0.1}


@pytest.fixture(autouse=True)
def _trim_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chores, "TRIM_INTERVAL_S", 0.1)


def test_streams_are_cut_and_a_cold_start_still_continues_exactly(pool: Pool) -> None:
    """Case 108."""
    worker = pool.worker(step_s=0.01, num_blocks=256)
    first = pool.scheduler(**SHORT).start()
    pool.submit(8, min_prompt=4, max_prompt=8, max_tokens=240)
    cut = pool.keys.plans("worker-0", 1)
    wait_for(lambda: len(worker.statuses) > 80)
    wait_for(lambda: pool.health() and pool.steps() < len(worker.statuses) / 2)
    wait_for(lambda: int(pool.client.xlen(cut)) < len(worker.statuses) / 2)
    assert not all(pool.has_ended(request_id) for request_id in pool.submissions)
    first.crash()
    time.sleep(0.1)
    pool.client.delete(pool.keys.snapshot)
    pool.scheduler(**SHORT).start()
    blocks = pool.keys.cached_blocks("worker-0", 1)
    assert pool.client.exists(blocks)
    pool.wait_until_ended()
    pool.check_texts()
    wait_for(lambda: not pool.client.exists(cut, blocks))  # nobody needs the ended incarnation's plans and cache


def test_record_plus_tail_is_the_committed_output_at_any_moment(pool: Pool) -> None:
    worker = pool.worker(step_s=0.002, num_blocks=256)
    pool.scheduler(**SHORT).start()
    ids = pool.submit(6, min_prompt=4, max_prompt=8, max_tokens=240)
    num_seats = 0
    while not all(pool.has_ended(request_id) for request_id in ids):
        assert pool.health()
        for request_id in ids:
            record = pool.record(request_id)
            messages = [_log.decode(e.payload) for e in scan(pool.client, pool.keys.steps, after=record.log_id)]
            follower = StepLogFollower()
            follower.track(request_id, len(record.output), record.seat)
            updates = [update for message in messages for update in follower.apply(message)]
            output = [*record.output, *(token for update in updates for token in update.tokens)]
            expected = reference_output(pool.submissions[request_id])[0]
            assert output == expected[: len(output)] and not any(update.gap for update in updates)
            num_seats += isinstance(record.seat, Seat)
    assert num_seats > 0 and len(worker.statuses) > 100
    pool.check_texts()


def test_folding_refreshes_a_live_records_ttl(pool: Pool) -> None:
    pool.worker(step_s=0.005)
    pool.scheduler(**SHORT).start()
    request_id = pool.submit(1, min_prompt=4, max_prompt=8, max_tokens=240)[0]
    pool.client.expire(pool.keys.request(request_id), 30)
    wait_for(lambda: len(pool.record(request_id).output) > 0 and not pool.has_ended(request_id))
    assert pool.client.ttl(pool.keys.request(request_id)) > 3600


@pytest.mark.parametrize(
    ("keep_s", "keep_bytes", "expected"),
    [(2.0, 0, "8000-0"), (0.0, 500, "5000-0"), (2.0, 500, "5000-0"), (5.0, 100, "5000-0"), (60.0, 0, "0-0")],
)
def test_the_log_keeps_time_or_bytes_whichever_is_more(
    redis_url: str, keys: Keys, keep_s: float, keep_bytes: int, expected: str
) -> None:
    trimmer = Trimmer(keys, keep_s=keep_s, keep_bytes=keep_bytes)
    client = connect(redis_url)
    for second in range(1, 11):
        client.xadd(keys.steps, {"m": b"x" * 2000}, id=f"{second}000-0")  # two entries per node
        trimmer.on_read(f"{second}000-0", 100)
    trimmer.on_folded("10000-0")
    trimmer.on_saved(Saved("10000-0", "0-0", {}, ()))
    trimmer.run(client)
    trimmer.run(client)
    oldest = next(scan(client, keys.steps)).entry_id
    client.close()
    # Whole nodes are cut, so a little more may stay, never less.
    assert trimmer._log_cut(Saved("10000-0", "0-0", {}, ())) == expected
    assert int(oldest.partition("-")[0]) <= max(1000, int(expected.partition("-")[0]))
    assert expected == "0-0" or int(oldest.partition("-")[0]) > 1000


@pytest.mark.parametrize(
    ("saved", "folded", "expected"), [("3000-0", "9000-0", "3000-0"), ("9000-0", "2000-5", "2000-5")]
)
def test_the_log_is_never_cut_before_fold_and_snapshot(keys: Keys, saved: str, folded: str, expected: str) -> None:
    """Case 107."""
    trimmer = Trimmer(keys, keep_s=0, keep_bytes=0)
    for second in range(1, 11):
        trimmer.on_read(f"{second}000-0", 100)
    trimmer.on_folded(folded)
    assert trimmer._log_cut(Saved(saved, "0-0", {}, ())) == expected


def test_usage_records_age_in_a_pool_at_rest_too(redis_url: str, keys: Keys) -> None:
    """Nothing comes to the log any more, whose last entry is none of what could tell the time."""
    client = connect(redis_url)
    for second in range(1, 11):
        client.xadd(keys.usage, {"m": b"x" * 5000}, id=f"{second}000-0")  # a node each
    trimmer = Trimmer(keys, keep_s=0, keep_bytes=0, keep_usage_s=60)
    trimmer.on_saved(Saved("8000-0", "0-0", {}, ()))
    left = []
    for now in (61.0, 65.0, 1000.0):
        trimmer.run(client, now=now)
        left.append(next(scan(client, keys.usage)).entry_id)
    client.close()
    assert left == ["1000-0", "5000-0", "8000-0"]  # no further than a restart needs


def test_a_plan_in_flight_is_never_cut(redis_url: str, keys: Keys) -> None:
    client = connect(redis_url)
    for plan in range(1, 8):
        client.xadd(keys.plans("worker-0", 1), {"m": b"x" * 5000}, id=f"{plan}-0")
    trimmer = Trimmer(keys, keep_s=0, keep_bytes=0)
    trimmer.on_saved(Saved("1-0", "0-0", {Incarnation("worker-0", 1): 5}, ()))
    trimmer.run(client)
    left = [entry.entry_id for entry in scan(client, keys.plans("worker-0", 1))]
    client.close()
    assert left == ["6-0", "7-0"]


def test_plans_that_nobody_has_answered_do_not_stay_for_ever(redis_url: str, keys: Keys) -> None:
    """Worker and leader may be gone for good before the first answer; a plan holds prompts."""
    client = connect(redis_url)
    client.xadd(keys.plans("worker-0", 1), {"m": b"x"}, id="1-0")
    trimmer = Trimmer(keys, keep_s=0, keep_bytes=0)
    trimmer.on_saved(Saved("1-0", "0-0", {}, (), cached=(Incarnation("worker-0", 1),)))
    trimmer.run(client, now=1.0)
    assert client.ttl(keys.plans("worker-0", 1)) > 0
    client.close()


def test_what_is_kept_aside_does_not_stay_for_ever(pool: Pool) -> None:
    pool.worker()
    scheduler = pool.scheduler().start()
    wait_for(lambda: scheduler.leader is not None)
    streams = (pool.keys.intake, pool.keys.steps)
    for stream in streams:
        pool.client.xadd(stream, {"m": b"no message"})
    wait_for(lambda: all(pool.client.ttl(f"{stream}:dead") > 0 for stream in streams))


def test_text_does_not_outlive_its_records(pool: Pool) -> None:
    """Case 137: prompts and outputs are token ids, which is their text. Once the records are gone nothing has them, but
    what has a time to live because nobody leads any more."""
    pool.worker(step_s=0.002)
    scheduler = pool.scheduler(record_ttl_s=1, snapshot_interval_s=0.1, fold_interval_s=0.2, log_keep_s=0.5).start()
    pool.submit(4, min_prompt=8, max_prompt=8, max_tokens=20)
    pool.wait_until_ended()
    wait_for(lambda: not pool.client.keys(pool.keys.request("*")))
    wait_for(lambda: not any(tokens_in(pool)), timeout_s=10)
    assert scheduler.leader is not None
    lasting = {key.encode() for key in (pool.keys.fence, pool.keys.limits, pool.keys.members, pool.keys.usage)}
    wait_for(lambda: all(pool.client.pttl(name) >= 0 for name in {*pool.client.keys("*")} - lasting))


def test_plans_and_snapshot_have_a_time_to_live_at_every_moment(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold prompts and outputs. Only when the streams were trimmed they got one, if ever."""
    monkeypatch.setattr(chores, "TRIM_INTERVAL_S", 600)
    pool.worker(step_s=0.005)
    pool.scheduler(snapshot_interval_s=0.1).start()
    request_id = pool.submit(1, min_prompt=4, max_prompt=8, max_tokens=240)[0]
    snapshot, plans = pool.keys.snapshot, pool.keys.plans("worker-0", 1)
    wait_for(lambda: pool.client.exists(snapshot, plans) == 2)
    digests = set()
    while not pool.has_ended(request_id):
        assert pool.client.ttl(snapshot) > 0 and pool.client.ttl(plans) > 0
        digests.add(pool.client.strlen(snapshot))
    assert len(digests) > 1  # it was saved meanwhile


def tokens_in(pool: Pool) -> list[bytes]:
    """What the streams hold of prompts and outputs."""
    found = []
    for _, payload in scan(pool.client, pool.keys.steps):
        message = _log.decode(payload)
        found += [message.tokens] if isinstance(message, StepResult) else []
    for _, payload in scan(pool.client, pool.keys.plans("worker-0", 1)):
        found += [row.tokens for row in _plan.decode(payload).added]
    return found
