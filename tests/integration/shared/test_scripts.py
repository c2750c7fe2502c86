"""The four scripts on a real Redis: what is accepted, what is refused, what a lost reply does."""

from contextlib import closing

import pytest
import redis

from shared.channel import Channel
from shared.errors import IdempotencyConflict, QueueFull
from shared.keys import Keys
from shared.limits import read_limits, read_limits_async, write_limits
from shared.messages import (
    Decoder,
    Final,
    FinishReason,
    IntakeMessage,
    Lease,
    LogMessage,
    StepResult,
    Submission,
    Submit,
    WorkerFenced,
    WorkerState,
    encode,
)
from shared.packing import pack_int32
from shared.records import final_fields, read_record
from shared.redis_client import connect_async
from shared.sampling import SamplingParams
from shared.scripts import (
    AppendStatus,
    SetFields,
    SetValue,
    Submitted,
    TickCommit,
    XAdd,
    acquire,
    commit_ticks,
    fence_worker,
    forget_workers,
    publish_step,
    read_fence,
    submit,
)
from shared.streams import read, scan

OK, ALREADY, STALE = AppendStatus.OK, AppendStatus.ALREADY, AppendStatus.STALE


def lease(instance: str) -> Lease:
    return Lease(service="scheduler", name="scheduler-0", instance=instance, pid=1, state=WorkerState.READY)


def lead(client: redis.Redis, keys: Keys, instance: str, held: int = 0, highest: int = 0) -> int:
    return acquire(client, keys, instance=instance, ttl_ms=2000, lease=lease(instance), held=held, highest=highest)


def admit(client: redis.Redis, keys: Keys, epoch: int, expected: int = 0, holder: str = "w") -> int:
    return fence_worker(
        client, keys, epoch=epoch, worker="worker-0", expected=expected, new_holder=holder, reason="admitted"
    )


def publish(client: redis.Redis, keys: Keys, incarnation: int, step: int, token: int = 7) -> AppendStatus:
    result = StepResult(worker="worker-0", incarnation=incarnation, step_id=step, tokens=pack_int32([token]))
    return publish_step(client, keys, worker="worker-0", incarnation=incarnation, step_id=step, payload=encode(result))


def commit(client: redis.Redis, keys: Keys, ticks: list[TickCommit]) -> list[AppendStatus]:
    with closing(Channel(client)) as channel:
        return commit_ticks(channel, keys, ticks)


def log(client: redis.Redis, keys: Keys) -> list[LogMessage]:
    decoder: Decoder[LogMessage] = Decoder(LogMessage)
    return [decoder.decode(entry.payload) for entry in scan(client, keys.steps)]


def submission(request_id: str, prompt: int = 4) -> Submission:
    return Submission(
        request_id=request_id,
        model="m",
        kind="completion",
        created=1.0,
        prompt_tokens=pack_int32(range(prompt)),
        params=SamplingParams(max_tokens=4, seed=1),
    )


# ---------------------------------------------------------------- leadership


def test_only_one_leader_and_a_new_one_gets_a_new_epoch(redis_client: redis.Redis, keys: Keys) -> None:
    assert lead(redis_client, keys, "a") == 1
    assert lead(redis_client, keys, "b") == 0
    assert lead(redis_client, keys, "a", held=1) == 1  # renewal
    redis_client.delete(keys.leader_lease)
    assert lead(redis_client, keys, "b") == 2
    assert lead(redis_client, keys, "a", held=1) == 0
    assert lead(redis_client, keys, "b") == 3  # it leads anew


def test_a_leader_whose_lease_lapsed_but_was_not_replaced_keeps_its_epoch(
    redis_client: redis.Redis, keys: Keys
) -> None:
    assert lead(redis_client, keys, "a") == 1
    redis_client.delete(keys.leader_lease)
    assert lead(redis_client, keys, "a", held=1) == 1


def test_a_fence_that_lost_its_epoch_keeps_the_lease_from_nobody(redis_client: redis.Redis, keys: Keys) -> None:
    """Who had led "renewed" epoch 0, which it did not hold: it had the lease for ever, and nobody led."""
    assert lead(redis_client, keys, "a") == 1
    redis_client.hdel(keys.fence, "epoch")
    assert lead(redis_client, keys, "a", highest=1) == 2


def test_no_number_is_given_twice_whatever_redis_forgot(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    assert admit(redis_client, keys, epoch) == 1
    redis_client.flushall()
    assert lead(redis_client, keys, "a", held=epoch, highest=epoch) == 2, "no renewal of what is not there"
    answer = fence_worker(
        redis_client, keys, epoch=2, worker="worker-0", expected=0, new_holder="w", reason="admitted", highest=1
    )
    assert answer == 2
    assert publish(redis_client, keys, 1, 1) is STALE
    assert log(redis_client, keys) == [WorkerFenced("worker-0", 1, "admitted")]


def test_writes_under_a_number_that_is_over_are_counted(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    incarnation = admit(redis_client, keys, epoch)
    assert read_fence(redis_client, keys).refused == {}
    admit(redis_client, keys, epoch, expected=incarnation)
    assert publish(redis_client, keys, incarnation, 1) is STALE
    assert publish(redis_client, keys, incarnation, 1) is STALE
    redis_client.delete(keys.leader_lease)
    lead(redis_client, keys, "b")
    assert commit(redis_client, keys, [TickCommit(epoch, 1, (SetValue(keys.snapshot, b"s", 60),))]) == [STALE]
    assert read_fence(redis_client, keys).refused == {"worker-0": 2, "leader": 1}


def test_ticks_of_a_replaced_leader_are_refused_whole(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    tick = TickCommit(epoch, 1, (XAdd("pw:{test}:plans:w:1", b"p", "1-0"), SetValue(keys.snapshot, b"s", 60)))
    assert commit(redis_client, keys, [tick]) == [OK]
    redis_client.delete(keys.leader_lease)
    lead(redis_client, keys, "b")
    late = TickCommit(epoch, 2, (XAdd("pw:{test}:plans:w:1", b"q", "2-0"), SetValue(keys.snapshot, b"late", 60)))
    assert commit(redis_client, keys, [late]) == [STALE]
    assert redis_client.xlen("pw:{test}:plans:w:1") == 1
    assert redis_client.get(keys.snapshot) == b"s"


def test_two_leaders_race_for_one_tick_and_one_wins(redis_client: redis.Redis, keys: Keys) -> None:
    old = lead(redis_client, keys, "a")
    redis_client.delete(keys.leader_lease)
    new = lead(redis_client, keys, "b")
    a = TickCommit(old, 1, (XAdd(keys.steps, b"old"),))
    b = TickCommit(new, 1, (XAdd(keys.steps, b"new"),))
    assert commit(redis_client, keys, [a]) == [STALE]
    assert commit(redis_client, keys, [b]) == [OK]
    assert [e.payload for e in scan(redis_client, keys.steps)] == [b"new"]


def test_a_commit_repeated_after_a_lost_reply_is_already_there(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    ticks = [TickCommit(epoch, n, (XAdd(keys.steps, b"%d" % n),)) for n in (1, 2, 3)]
    assert commit(redis_client, keys, ticks[:2]) == [OK, OK]
    assert commit(redis_client, keys, ticks) == [ALREADY, ALREADY, OK]
    assert commit(redis_client, keys, ticks[2:]) == [ALREADY]
    assert [e.payload for e in scan(redis_client, keys.steps)] == [b"1", b"2", b"3"]


def test_a_tick_may_not_be_skipped_or_rewritten(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    assert commit(redis_client, keys, [TickCommit(epoch, 2, (XAdd(keys.steps, b"x"),))]) == [STALE]
    assert commit(redis_client, keys, [TickCommit(epoch, 1, (XAdd(keys.steps, b"x"),))]) == [OK]
    assert commit(redis_client, keys, [TickCommit(epoch, 1, (XAdd(keys.steps, b"y"),))]) == [STALE]
    assert redis_client.xlen(keys.steps) == 1


def test_a_commit_writes_plan_events_record_and_snapshot_together(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    redis_client.hset(keys.request("r"), "submission", encode(submission("r")))
    final = Final(reason=FinishReason.LENGTH, num_output_tokens=2)
    operations = (
        XAdd(keys.plans("w", 1), b"plan", "1-0"),
        XAdd(keys.steps, b"events"),
        SetFields(keys.request("r"), final_fields(pack_int32([5, 6]), "9-0", final), 60),
        SetValue(keys.snapshot, b"state", 60),
    )
    assert commit(redis_client, keys, [TickCommit(epoch, 1, operations)]) == [OK]
    record = read_record(redis_client, keys, "r")
    assert record is not None and record.final == final and list(record.output) == [5, 6] and record.log_id == "9-0"
    assert 0 < redis_client.ttl(keys.request("r")) <= 60 and 0 < redis_client.ttl(keys.snapshot) <= 60
    assert [e.entry_id for e in scan(redis_client, keys.plans("w", 1))] == ["1-0"]
    assert read_fence(redis_client, keys).tick == 1


def test_scripts_survive_a_script_flush(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    ticks = [TickCommit(epoch, n, (XAdd(keys.steps, b"x"),)) for n in (1, 2, 3)]
    redis_client.script_flush()
    assert commit(redis_client, keys, ticks[:2]) == [OK, OK]
    redis_client.script_flush()
    assert commit(redis_client, keys, ticks[2:]) == [OK]


# ---------------------------------------------------------------- workers


def test_a_worker_publishes_in_order_and_a_lost_reply_is_already_there(redis_client: redis.Redis, keys: Keys) -> None:
    incarnation = admit(redis_client, keys, lead(redis_client, keys, "a"))
    assert incarnation == 1
    assert publish(redis_client, keys, 1, 1) is OK
    assert publish(redis_client, keys, 1, 1) is ALREADY
    assert publish(redis_client, keys, 1, 1, token=8) is STALE  # other content under the same number
    assert publish(redis_client, keys, 1, 3) is STALE
    assert publish(redis_client, keys, 1, 2) is OK
    assert publish(redis_client, keys, 1, 1) is STALE
    assert [m.step_id for m in log(redis_client, keys) if isinstance(m, StepResult)] == [1, 2]


def test_nothing_of_a_fenced_incarnation_follows_its_fence(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    admit(redis_client, keys, epoch)
    assert publish(redis_client, keys, 1, 1) is OK
    assert admit(redis_client, keys, epoch, expected=1, holder="w2") == 2
    assert publish(redis_client, keys, 1, 2) is STALE
    assert publish(redis_client, keys, 2, 1) is OK
    kinds = [(type(m), m.incarnation) for m in log(redis_client, keys)]  # type: ignore[union-attr]
    assert kinds == [(WorkerFenced, 0), (StepResult, 1), (WorkerFenced, 1), (StepResult, 2)]


def test_a_fence_between_append_and_reply_keeps_the_append(redis_client: redis.Redis, keys: Keys) -> None:
    """The worker's append landed, its reply is lost, then it is fenced: its retry is refused, the entry stays, once."""
    epoch = lead(redis_client, keys, "a")
    admit(redis_client, keys, epoch)
    assert publish(redis_client, keys, 1, 1) is OK  # reply lost
    admit(redis_client, keys, epoch, expected=1, holder="")
    assert publish(redis_client, keys, 1, 1) is STALE
    entries = log(redis_client, keys)
    assert [type(m) for m in entries] == [WorkerFenced, StepResult, WorkerFenced]


def test_the_log_has_a_time_to_live_before_it_holds_a_token(redis_client: redis.Redis, keys: Keys) -> None:
    """A pool that dies at once, for good, leaves no text."""
    incarnation = admit(redis_client, keys, lead(redis_client, keys, "a"))
    assert publish(redis_client, keys, incarnation, 1) == OK
    assert redis_client.ttl(keys.steps) > 0


def test_only_the_leader_fences(redis_client: redis.Redis, keys: Keys) -> None:
    old = lead(redis_client, keys, "a")
    admit(redis_client, keys, old)
    redis_client.delete(keys.leader_lease)
    lead(redis_client, keys, "b")
    assert admit(redis_client, keys, old, expected=1) == 0
    assert read_fence(redis_client, keys).workers["worker-0"].incarnation == 1


def test_a_fence_repeated_after_a_lost_reply_does_not_bump_twice(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    assert admit(redis_client, keys, epoch) == 1
    assert admit(redis_client, keys, epoch) == -1
    state = read_fence(redis_client, keys).workers["worker-0"]
    assert (state.incarnation, state.holder, state.step) == (1, "w", 0)
    assert len(log(redis_client, keys)) == 1


def test_a_restarted_worker_begins_at_step_one_of_its_own_incarnation(redis_client: redis.Redis, keys: Keys) -> None:
    epoch = lead(redis_client, keys, "a")
    admit(redis_client, keys, epoch)
    for step in (1, 2, 3):
        assert publish(redis_client, keys, 1, step) is OK
    assert admit(redis_client, keys, epoch, expected=1, holder="again") == 2
    assert publish(redis_client, keys, 2, 4) is STALE
    assert publish(redis_client, keys, 2, 1) is OK
    assert read_fence(redis_client, keys).workers["worker-0"].holder == "again"


def test_who_is_gone_leaves_the_fence_and_no_incarnation_is_given_twice(redis_client: redis.Redis, keys: Keys) -> None:
    """Case 106. A process may still be there that held the name once."""
    epoch = lead(redis_client, keys, "a")
    admit(redis_client, keys, epoch)
    assert forget_workers(redis_client, keys, epoch=epoch, incarnations={"worker-0": 1})
    assert "worker-0" in read_fence(redis_client, keys).workers, "it is held"
    assert admit(redis_client, keys, epoch, expected=1, holder="") == 2
    assert not forget_workers(redis_client, keys, epoch=epoch - 1, incarnations={"worker-0": 2})
    assert forget_workers(redis_client, keys, epoch=epoch, incarnations={"worker-0": 1})
    assert "worker-0" in read_fence(redis_client, keys).workers, "it has another incarnation"
    assert publish(redis_client, keys, 1, 1) is STALE
    assert forget_workers(redis_client, keys, epoch=epoch, incarnations={"worker-0": 2, "never-there": 0})
    fence = read_fence(redis_client, keys)
    assert (fence.workers, fence.refused, fence.forgotten) == ({}, {}, 2)
    assert publish(redis_client, keys, 1, 1) is STALE and publish(redis_client, keys, 2, 1) is STALE
    answer = fence_worker(
        redis_client,
        keys,
        epoch=epoch,
        worker="worker-0",
        expected=0,
        new_holder="w",
        reason="admitted",
        highest=fence.forgotten,
    )
    assert answer == 3
    assert publish(redis_client, keys, 2, 1) is STALE and publish(redis_client, keys, 3, 1) is OK


# ---------------------------------------------------------------- submission


async def test_submit_writes_the_record_then_the_intake_entry(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    client = connect_async(redis_url)
    answer = await submit(client, keys, submission("r1"), ttl_s=60)
    assert answer.accepted
    record = read_record(redis_client, keys, "r1")
    assert record is not None and record.submission == submission("r1") and not record.output
    decoder: Decoder[IntakeMessage] = Decoder(IntakeMessage)
    entries = read(redis_client, {keys.intake: "0"})[keys.intake]
    assert [decoder.decode(e.payload) for e in entries] == [Submit(request_id="r1")]
    assert (await read_limits_async(client, keys)).queued == 1
    await client.aclose()


async def test_a_repeated_submit_counts_once_and_a_foreign_id_is_refused(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    client = connect_async(redis_url)
    for _ in range(3):
        assert (await submit(client, keys, submission("r1"), ttl_s=60)).accepted
    assert not (await submit(client, keys, submission("r1", prompt=5), ttl_s=60)).accepted
    assert redis_client.xlen(keys.intake) == 1
    assert read_limits(redis_client, keys).submitted == 1
    await client.aclose()


async def test_caps_in_requests_and_tokens_refuse_before_anything_is_written(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    client = connect_async(redis_url)
    write_limits(redis_client, keys, cap_requests=2, cap_tokens=10)
    assert (await submit(client, keys, submission("a"), ttl_s=60)).accepted
    with pytest.raises(QueueFull, match="tokens"):
        await submit(client, keys, submission("b", prompt=7), ttl_s=60)
    assert (await submit(client, keys, submission("c"), ttl_s=60)).accepted
    with pytest.raises(QueueFull, match="requests"):
        await submit(client, keys, submission("d", prompt=1), ttl_s=60)
    assert redis_client.xlen(keys.intake) == 2
    assert read_record(redis_client, keys, "d") is None
    write_limits(redis_client, keys, left=1, left_tokens=4)
    assert (await submit(client, keys, submission("d", prompt=1), ttl_s=60)).accepted
    await client.aclose()


async def test_an_idempotency_key_stands_for_one_body_of_one_tenant(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    client = connect_async(redis_url)
    key = {"ttl_s": 60, "idempotency_digest": "k"}
    assert (await submit(client, keys, submission("a"), body_digest="x", **key)).accepted  # type: ignore[arg-type]
    again = await submit(client, keys, submission("b"), body_digest="x", **key)  # type: ignore[arg-type]
    assert (again.accepted, again.request_id) == (False, "a")
    with pytest.raises(IdempotencyConflict):
        await submit(client, keys, submission("c"), body_digest="y", **key)  # type: ignore[arg-type]
    assert redis_client.xlen(keys.intake) == 1
    await client.aclose()


# ---------------------------------------------------------------- several together


async def test_several_requests_are_queued_together_in_order(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    client = connect_async(redis_url)
    group = [submission("g"), submission("g#1"), submission("g#2")]
    for _ in range(2):  # the second time as after a lost reply
        assert (await submit(client, keys, *group, ttl_s=60)) == Submitted(True, "g")
    decoder: Decoder[IntakeMessage] = Decoder(IntakeMessage)
    entries = read(redis_client, {keys.intake: "0"})[keys.intake]
    assert [decoder.decode(e.payload) for e in entries] == [Submit(request_id=s.request_id) for s in group]
    for one in group:
        record = read_record(redis_client, keys, one.request_id)
        assert record is not None and record.submission == one
        assert 0 < redis_client.ttl(keys.request(one.request_id)) <= 60
    limits = read_limits(redis_client, keys)
    assert (limits.submitted, limits.submitted_tokens) == (3, 12)
    await client.aclose()


def contents(client: redis.Redis) -> dict[bytes, bytes | None]:
    """Every key and its value, as bytes that are equal if nothing was written."""
    return {key: client.dump(key) for key in client.keys("*")}  # type: ignore[misc]


@pytest.mark.parametrize("caps", [{"cap_requests": 3}, {"cap_tokens": 15}])
async def test_a_group_that_does_not_fit_the_queue_writes_nothing(
    redis_url: str, redis_client: redis.Redis, keys: Keys, caps: dict[str, int]
) -> None:
    """Case 87: n counts as n, in requests and in tokens."""
    client = connect_async(redis_url)
    write_limits(redis_client, keys, **caps)
    assert (await submit(client, keys, submission("a"), ttl_s=60)).accepted
    before = contents(redis_client)
    group = [submission("g"), submission("g#1"), submission("g#2")]
    with pytest.raises(QueueFull, match=next(iter(caps)).removeprefix("cap_")):
        await submit(client, keys, *group, ttl_s=60, idempotency_digest="k", body_digest="x")
    assert contents(redis_client) == before
    assert (await submit(client, keys, *group[:2], ttl_s=60)).accepted  # what fits is taken
    await client.aclose()


@pytest.mark.parametrize("taken", [0, 1, 2])
async def test_one_taken_id_refuses_the_whole_group(
    redis_url: str, redis_client: redis.Redis, keys: Keys, taken: int
) -> None:
    client = connect_async(redis_url)
    group = [submission("g"), submission("g#1"), submission("g#2")]
    assert (await submit(client, keys, submission(group[taken].request_id, prompt=5), ttl_s=60)).accepted
    before = contents(redis_client)
    assert await submit(client, keys, *group, ttl_s=60) == Submitted(False, group[taken].request_id)
    assert contents(redis_client) == before
    await client.aclose()


async def test_a_part_of_a_group_is_no_retry_of_it(redis_url: str, redis_client: redis.Redis, keys: Keys) -> None:
    client = connect_async(redis_url)
    group = [submission("g"), submission("g#1")]
    assert (await submit(client, keys, group[0], ttl_s=60)).accepted
    assert await submit(client, keys, *group, ttl_s=60) == Submitted(False, "g")
    assert read_record(redis_client, keys, "g#1") is None
    await client.aclose()


async def test_a_group_repeated_under_its_key_after_a_lost_reply_is_accepted_once(
    redis_url: str, redis_client: redis.Redis, keys: Keys
) -> None:
    client = connect_async(redis_url)
    group = [submission("g"), submission("g#1")]
    other = [submission("h"), submission("h#1")]
    key = {"ttl_s": 60, "idempotency_digest": "k", "body_digest": "x"}
    for _ in range(2):
        assert (await submit(client, keys, *group, **key)).accepted  # type: ignore[arg-type]
    assert await submit(client, keys, *other, **key) == Submitted(False, "g")  # type: ignore[arg-type]
    assert redis_client.xlen(keys.intake) == 2
    assert read_limits(redis_client, keys).submitted == 2
    await client.aclose()
