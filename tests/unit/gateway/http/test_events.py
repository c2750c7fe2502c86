"""The wire form of events."""

from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.http import sse
from services.gateway.http.event_ids import Received
from services.gateway.http.shapes import ChatShape, CompletionShape
from services.gateway.streams.sequences import Progress
from tests.fakes.sse_reader import parse_sse


def test_line_breaks_in_text_do_not_break_events() -> None:
    data = {"text": "a\n\nid: 9\r\ndata: x\u2028\u2029\x85"}
    wire = sse.event(data, Received([17, 15], [False, False]).event_id)
    assert wire.count(b"\n") == 3
    (event,) = parse_sse(wire.decode().split("\n")).events
    assert event.data == data and event.event_id == "17,15"


def test_a_terminal_chat_chunk_may_have_no_text() -> None:
    shape = ChatShape("chatcmpl-1", "m", 7)
    chunk = shape.chunk(Progress(0, "", 3, "length"))
    assert chunk["choices"][0]["delta"] == {} and chunk["choices"][0]["finish_reason"] == "length"
    assert shape.chunk(Progress(0, "x", 3))["choices"][0] == {
        "index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None,
    }  # fmt: skip


def test_all_chunks_of_a_request_share_their_head() -> None:
    for shape in (ChatShape("id-1", "m", 7), CompletionShape("id-1", "m", 7)):
        chunks = [shape.chunk(Progress(0, "x", 1)), shape.bare_chunk(), shape.whole([Progress(0, "x", 1, "stop")])]
        assert {(c["id"], c["created"], c["model"]) for c in chunks} == {("id-1", 7, "m")}


@given(text=st.text(), count=st.integers(1, 9), usage=st.booleans())
@example(text=sse.MARK, count=1, usage=True)
@example(text='"\\', count=1, usage=False)
def test_a_frame_gives_the_bytes_that_the_whole_chunk_gives(text: str, count: int, usage: bool) -> None:
    identity = Received([count], [False]).event_id
    for shape in (ChatShape('i"d', sse.MARK, 7), CompletionShape("id", "m", 7)):
        model, chunk = shape.chunk(Progress(0, sse.MARK, 0)), shape.chunk(Progress(0, text or "-", count))
        if usage:
            model["usage"] = chunk["usage"] = None
        assert sse.TextFrame(model).event(text or "-", identity) == sse.event(chunk, identity)
