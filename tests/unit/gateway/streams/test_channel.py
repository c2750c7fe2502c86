"""A channel takes each token once, in order, and nothing after the end."""

from array import array

from services.gateway.streams.channel import Ending, TokenChannel
from shared.messages import EndReason, EventKind, FinishReason, RequestEvent


def make(capacity: int = 100) -> tuple[TokenChannel, list[int]]:
    news: list[int] = []
    return TokenChannel("r", capacity, lambda channel: news.append(channel.committed)), news


def test_offers_are_idempotent() -> None:
    channel, news = make()
    channel.offer(0, [1, 2, 3])
    channel.offer(1, [2, 3, 4])
    channel.offer(0, [1, 2])
    assert channel.take(100) == (array("i", [1, 2, 3, 4]), None)
    assert news == [3, 4]


def test_tokens_behind_a_hole_are_not_taken() -> None:
    channel, news = make()
    channel.offer(2, [3])
    assert channel.committed == 0 and news == []


def test_tokens_that_wait_are_taken_together_and_once() -> None:
    channel, _ = make()
    for token in range(5):
        channel.offer(token, [token])
    assert list(channel.take(100)[0]) == [0, 1, 2, 3, 4]
    assert list(channel.take(100)[0]) == []


def test_nothing_follows_the_first_ending() -> None:
    channel, news = make()
    channel.offer(0, [1])
    channel.end(Ending.from_worker(EndReason.EOS))
    channel.offer(1, [2])
    channel.end(Ending.failure("late", "too late"))
    tokens, ending = channel.take(100)
    assert list(tokens) == [1] and ending == Ending(FinishReason.STOP, EndReason.EOS)
    assert len(news) == 2


def test_holds_no_more_than_its_capacity() -> None:
    channel, _ = make(capacity=3)
    channel.offer(0, list(range(10)))
    channel.offer(3, [3])
    assert list(channel.take(100)[0]) == [0, 1, 2]


def test_an_unknown_reason_is_an_error() -> None:
    ending = Ending.from_event(RequestEvent("r", EventKind.FINISHED, 0, "novel"))
    assert ending.reason is FinishReason.ERROR and ending.code == "generation_failed"


def test_a_token_that_was_told_never_changes() -> None:
    """After Redis lost its last second the same tokens are computed again; if they are others, the stream must end."""
    channel, _ = make()
    channel.offer(0, [1, 2, 3])
    channel.offer(0, [1, 2])
    channel.offer(2, [3, 4])
    assert channel.take(100) == (array("i", [1, 2, 3, 4]), None)
    channel.offer(1, [2, 9, 4, 5])
    tokens, ending = channel.take(100)
    assert not tokens and ending is not None and ending.code == "log_rolled_back"


def test_no_more_than_the_capacity_is_taken() -> None:
    channel, _ = make(capacity=3)
    channel.offer(0, [1, 2])
    channel.offer(1, [2, 3, 4, 5])
    channel.offer(3, [6])
    assert list(channel.take(100)[0]) == [1, 2, 3]


def test_what_nobody_took_is_withdrawn_by_an_end_from_outside() -> None:
    channel = TokenChannel("r", 10, lambda _: None)
    channel.offer(0, [1, 2, 3])
    assert channel.take(100)[0].tolist() == [1, 2, 3]
    channel.offer(3, [4, 5, 6])
    channel.withdraw(5)
    assert channel.take(100)[0].tolist() == [4, 5]
    channel.withdraw(2)
    assert channel.committed == 5, "what was taken stays"


def test_a_long_answer_is_taken_in_parts_and_its_end_with_the_last() -> None:
    channel, _ = make()
    channel.offer(0, list(range(10)))
    channel.end(Ending.from_worker(EndReason.EOS))
    assert channel.take(4) == (array("i", [0, 1, 2, 3]), None) and channel.has_waiting
    assert channel.take(4)[1] is None
    tokens, ending = channel.take(4)
    assert tokens.tolist() == [8, 9] and ending is not None and not channel.has_waiting
