"""Events, however the network cuts them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.cli.sse import Event, SseParser

STREAM = (
    b'id: 1\ndata: {"a": "\xc3\xa4"}\n\n: ping\n\ndata: x\ndata: y\n\r\nevent: error\r\ndata: z\r\n\r\ndata: [DONE]\n\n'
)
EVENTS = [Event(b'{"a": "\xc3\xa4"}', b"1"), Event(b"x\ny"), Event(b"z", event=b"error"), Event(b"[DONE]")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()
    found = [event for a, b in pairwise(bounds) for event in parser.feed(STREAM[a:b])]
    assert found == EVENTS
