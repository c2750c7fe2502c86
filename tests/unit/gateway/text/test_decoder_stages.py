"""Decoders that random tokens of the property test cannot reach: those that the library itself does not survive."""

import pytest
from tokenizers import Tokenizer, decoders, models

from services.gateway.text.decoder_stages import ByteRuns, FusedStrip, Utf8Bytes, strip
from services.gateway.text.detokenizer import DecoderPlan
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"), [("  a  ", " a "), (" ", ""), ("", ""), ("   ", " "), ("a", "a"), ("    ", "  ")]
)
def test_strip_of_whole_text_and_in_pieces(text: str, expected: str) -> None:
    assert strip(text, " ", 1, 1) == expected
    stage = FusedStrip(" ", 1, 1)
    pieces = [piece for character in text for piece in stage.push(character)]
    assert "".join(map(str, [*pieces, *stage.flush()])) == expected


def test_trailing_spaces_wait_and_nothing_else_does() -> None:
    stage = FusedStrip(" ", 0, 2)
    assert [list(stage.push(piece)) for piece in ("a", " ", " ", " ", "b")] == [["a"], [], [], [" "], ["  b"]]


def test_a_byte_run_is_held_until_text_ends_it_because_a_later_byte_may_spoil_it() -> None:
    stage = ByteRuns()
    assert [stage.push(bytes((byte,))) for byte in "é".encode()] == [(), ()]
    assert stage.push("x") == ("é", "x")
    stage.push("é".encode())
    stage.push(b"\xff")
    assert stage.flush() == ("\ufffd",) * 3


def test_byte_level_text_comes_with_the_last_byte_of_a_character() -> None:
    stage = Utf8Bytes()
    assert ["".join(map(str, stage.push(bytes((byte,))))) for byte in "a𠀀".encode()] == ["a", "", "", "", "𠀀"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
    ],
)
def test_a_decoder_that_cannot_run_incrementally_is_refused_at_the_start(decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match="decoder"):
        DecoderPlan(tokenizer)
