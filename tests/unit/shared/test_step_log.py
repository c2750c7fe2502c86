"""A follower attributes tokens to its requests whatever else is in the log."""

from collections.abc import Sequence

import msgspec
import pytest

from shared import step_log
from shared.errors import MalformedMessage
from shared.messages import (
    EndReason,
    EventKind,
    FinishReason,
    LogMessage,
    RequestEvent,
    StepResult,
    TickEntry,
    WorkerFenced,
)
from shared.packing import NO_TOKEN, pack_int32
from shared.records import Seat
from shared.step_log import StepLogFollower, Update

JoinedRows = tuple[tuple[int, str, int], ...]


def step(
    step_id: int,
    tokens: list[int],
    *,
    joined: JoinedRows = (),
    left: tuple[int, ...] = (),
    ended: tuple[tuple[int, int], ...] = (),
    roster: JoinedRows = (),
    incarnation: int = 1,
    worker: str = "w",
) -> StepResult:
    return StepResult(
        worker=worker,
        incarnation=incarnation,
        step_id=step_id,
        tokens=pack_int32(tokens),
        joined=joined,
        left=left,
        ended=ended,
        roster=roster,
    )


def follow(*request_ids: str) -> StepLogFollower:
    follower = StepLogFollower()
    for request_id in request_ids:
        follower.track(request_id)
    return follower


def test_what_was_cached_is_told_to_those_who_follow_the_request() -> None:
    follower = follow("a", "b")
    updates = follower.apply(TickEntry(cached=(("a", 32), ("stranger", 16))))
    assert updates == [Update("a", num_cached_tokens=32)]


def collect(follower: StepLogFollower, messages: Sequence[LogMessage]) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for message in messages:
        for update in follower.apply(message):
            assert not update.gap
            out.setdefault(update.request_id, []).extend(update.tokens)
    return out


def test_tokens_follow_their_row_and_foreign_rows_are_not_touched() -> None:
    log: list[LogMessage] = [
        step(1, [11, 21], joined=((0, "a", 0), (1, "foreign", 0))),
        step(2, [12, 22, 31], joined=((2, "b", 0),)),
        step(3, [13, NO_TOKEN, 32]),
    ]
    assert collect(follow("a", "b"), log) == {"a": [11, 12, 13], "b": [31, 32]}


def test_log_probabilities_go_with_the_tokens_that_count() -> None:
    follower = follow("a")
    log = [
        msgspec.structs.replace(step(1, [11, 21], joined=((0, "a", 0), (1, "b", 0))), logprobs=((0, -0.5),)),
        msgspec.structs.replace(step(2, [12, 22]), logprobs=((0, -0.25), (1, -3.0))),
    ]
    updates = [update for message in log for update in follower.apply(message)]
    assert [(update.tokens, update.logprobs) for update in updates] == [([11], [-0.5]), ([12], [-0.25])]
    late = StepLogFollower()
    late.track("a", committed=1)
    assert late.apply(log[0]) == [], "a token that was known already counts once"


def test_an_ended_row_yields_its_last_token_and_may_be_reused() -> None:
    follower = follow("a", "b")
    assert follower.apply(step(1, [5], joined=((0, "a", 0),)))[0].end_reason is None
    update = follower.apply(step(2, [6], ended=((0, EndReason.EOS),)))[0]
    assert (update.tokens, update.end_reason, update.num_committed) == ([6], EndReason.EOS, 2)
    assert follower.apply(step(3, [NO_TOKEN])) == []
    assert collect(follower, [step(4, [9], joined=((0, "b", 0),))]) == {"b": [9]}


def test_doubled_and_late_results_count_once() -> None:
    """Case 109."""
    follower = follow("a")
    log: list[LogMessage] = [step(1, [1], joined=((0, "a", 0),)), step(2, [2])]
    assert collect(follower, [log[0], log[0], log[1], log[0], log[1]]) == {"a": [1, 2]}


def test_a_request_that_comes_back_on_another_worker_repeats_nothing() -> None:
    follower = follow("a")
    log: list[LogMessage] = [
        step(1, [1], joined=((0, "a", 0),)),
        step(2, [2]),
        WorkerFenced(worker="w", incarnation=1),
        step(3, [99]),  # of the fenced incarnation: cannot happen, must not count
        step(1, [NO_TOKEN] * 4 + [3], worker="v", joined=((4, "a", 2),)),
    ]
    assert collect(follower, log) == {"a": [1, 2, 3]}


def test_a_token_that_is_committed_already_is_not_delivered_again() -> None:
    follower = follow("a")
    collect(follower, [step(1, [1], joined=((0, "a", 0),)), step(2, [2])])
    again = [step(1, [2], worker="v", joined=((0, "a", 1),)), step(2, [3], worker="v")]
    assert collect(follower, again) == {"a": [3]}


def test_nothing_counts_after_the_terminal_event() -> None:
    follower = follow("a")
    follower.apply(step(1, [1], joined=((0, "a", 0),)))
    event = RequestEvent("a", EventKind.FINISHED, 1, FinishReason.ABORT)
    assert follower.apply(TickEntry(events=(event,))) == [Update("a", num_committed=1, event=event)]
    assert follower.apply(step(2, [2])) == []


def test_a_missing_step_is_reported_as_a_gap_to_every_live_request() -> None:
    follower = follow("a", "b")
    follower.apply(step(1, [1], joined=((0, "a", 0),)))
    assert [(u.request_id, u.gap) for u in follower.apply(step(3, [3]))] == [("a", True), ("b", True)]


def test_a_first_step_that_is_not_step_one_is_a_gap_after_a_fence() -> None:
    follower = follow("a")
    follower.apply(step(1, [1], joined=((0, "a", 0),)))
    follower.apply(WorkerFenced(worker="w", incarnation=1))
    assert follower.apply(step(2, [2], incarnation=2))[0].gap


def test_workers_whose_names_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 106, in gateways. Of who works a missing step is noticed all the same."""
    monkeypatch.setattr(step_log, "MOST_WORKERS", 3)
    follower = StepLogFollower()
    follower.track("r")
    follower.apply(StepResult("lasting", 1, 1))
    for number in range(20):
        follower.apply(StepResult(f"pod-{number}", 1, 1))
        follower.apply(WorkerFenced(f"pod-{number}", 1, "gone"))
    assert len(follower._workers) == 3
    assert [update.gap for update in follower.apply(StepResult("lasting", 1, 3))] == [True]


def test_a_late_reader_learns_from_the_roster_that_it_lacks_tokens() -> None:
    follower = follow("a")
    follower.apply(step(63, [7]))
    update = follower.apply(step(64, [8], roster=((0, "a", 64),)))[0]
    assert update.gap and not update.tokens


def test_a_reader_seated_by_the_record_continues_without_a_roster() -> None:
    follower = StepLogFollower()
    follower.track("a", committed=10, seat=Seat("w", 1, 0))
    assert collect(follower, [step(11, [7]), step(12, [8])]) == {"a": [7, 8]}


def test_a_tail_that_does_not_follow_the_record_is_a_gap() -> None:
    """Steps 12 and 13 are gone from the log: the token of step 14 is not the one behind the record's."""
    follower = StepLogFollower()
    follower.track("a", committed=10, seat=Seat("w", 1, 0, 11))
    (update,) = follower.apply(step(14, [9]))
    assert update.gap and not update.tokens
    follower.track("b", committed=0)
    follower.track("a", committed=13, seat=follower.place_of("b")[1] or Seat("w", 1, 0, 14))
    assert collect(follower, [step(15, [7])]) == {"a": [7]}


def test_record_plus_tail_is_the_committed_output() -> None:
    """Output 1, 2 came from the record; its seat tells whose row the tail's first step is."""
    follower = StepLogFollower()
    follower.track("a", committed=2, seat=Seat("w", 1, 0))
    tail: list[LogMessage] = [
        step(4, [3]),
        WorkerFenced(worker="w", incarnation=1),
        step(1, [NO_TOKEN, 4], joined=((1, "a", 3),), incarnation=2),
        step(2, [NO_TOKEN, 5], ended=((1, EndReason.LENGTH),), incarnation=2),
    ]
    updates = [update for message in tail for update in follower.apply(message)]
    assert [token for update in updates for token in update.tokens] == [3, 4, 5]
    assert updates[-1].end_reason is EndReason.LENGTH and not any(update.gap for update in updates)


def test_a_tail_that_was_trimmed_too_far_is_a_gap() -> None:
    follower = StepLogFollower()
    follower.track("a", committed=1)
    assert follower.apply(step(9, [5], joined=((0, "a", 4),)))[0].gap


@pytest.mark.parametrize(
    "broken",
    [
        msgspec.structs.replace(step(2, []), tokens=b"abc"),
        step(2, [-2]),
        step(2, [-1, -256, 511]),
        step(2, [6], ended=((0, 99),)),
        step(2, [6], joined=((-5, "a", 1),)),
        step(2, [6], roster=((-5, "a", 2),)),
    ],
)
def test_a_step_that_no_worker_can_mean_is_refused_and_counts_for_nothing(broken: StepResult) -> None:
    """One such entry in the log ended every gateway, and would have ended each cold start of a scheduler."""
    follower = follow("a")
    follower.apply(step(1, [5], joined=((0, "a", 0),)))
    with pytest.raises(MalformedMessage):
        follower.apply(broken)
    assert collect(follower, [step(2, [6])]) == {"a": [6]}
