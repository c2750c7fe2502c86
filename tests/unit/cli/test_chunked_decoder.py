"""Chunked transfer coding, however the network cuts it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.load_client import BrokenAnswer, ChunkedDecoder


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(0, 400), max_size=12))
def test_any_cut_gives_the_same_content(contents: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(b"%x;x=y\r\n%s\r\n" % (len(content), content) for content in contents) + b"0\r\n\r\n"
    decoder = ChunkedDecoder()
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert [piece for a, b in pairwise(bounds) for piece in decoder.feed(stream[a:b])] == contents
    assert decoder.ended


def test_a_stream_that_was_cut_has_not_ended() -> None:
    decoder = ChunkedDecoder()
    assert list(decoder.feed(b"3\r\nabc\r\n5\r\nde")) == [b"abc"]
    assert not decoder.ended


def test_no_number_is_no_chunk() -> None:
    with pytest.raises(BrokenAnswer):
        list(ChunkedDecoder().feed(b"hello\r\nabc"))
