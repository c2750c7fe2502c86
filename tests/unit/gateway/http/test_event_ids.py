"""The ids of events are read back as they were written, and nothing else is read."""

import pytest

from services.gateway.http.event_ids import Received, parse_last_event_id
from shared.errors import InvalidRequest


@pytest.mark.parametrize(
    ("counts", "ended", "has_usage", "text"),
    [
        ([17], [False], False, b"17"),
        ([17, 15], [False, True], False, b"17,15e"),
        ([17, 15], [True, True], True, b"17e,15eu"),
        ([0, 3], [False, False], False, b"0,3"),
    ],
)
def test_round_trip(counts: list[int], ended: list[bool], has_usage: bool, text: bytes) -> None:
    received = Received(counts, ended, has_usage)
    assert received.event_id == text
    assert parse_last_event_id(text.decode(), [20] * len(counts)) == received


@pytest.mark.parametrize("text", [None, "", "0", " 0 "])
def test_from_the_start(text: str | None) -> None:
    received = parse_last_event_id(text, [5, 5, 5])
    assert received == Received.nothing(3) and received.is_nothing


@pytest.mark.parametrize("text", ["17,", "e", "1e1", "0x1", "+1", "-1", "1.0", "1 2", "6", "1,1", "1u", "١", "1" * 11])
def test_malformed(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_last_event_id(text, [5])
    assert refused.value.status == 400 and refused.value.param == "Last-Event-ID"


def test_it_costs_little_however_long() -> None:
    with pytest.raises(InvalidRequest):
        parse_last_event_id("1," * 10**6, [5])
