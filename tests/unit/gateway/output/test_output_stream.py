"""E by example: endings, counts, stop strings (BEST-12, cases 30 to 35)."""

import string
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.gateway.output.output_function import Delta, OutputFunction
from services.gateway.output.stop_strings import StopStrings
from services.gateway.text.model_files import ModelText
from services.gateway.text.tokenizer import TextTokenizer
from shared.messages import EndReason, FinishReason, Submission
from shared.packing import pack_int32
from shared.sampling import SamplingParams

LETTERS = string.ascii_letters + string.digits
PIECES = ["<s>", "</s>", *LETTERS, "▁", "▁hello", "▁world", "ABC", "▁DEF", "GHIJ", "<0xC3>", "<0xA9>"]
EOS = 1


def make_tokenizer() -> TextTokenizer:
    """Metaspace words with byte fallback, as Llama 2."""
    inner = Tokenizer(models.BPE({piece: index for index, piece in enumerate(PIECES)}, [], byte_fallback=True))
    inner.add_special_tokens([AddedToken(piece, special=True) for piece in PIECES[:2]])
    strip = decoders.Strip(content=" ", left=1, right=0)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return TextTokenizer(inner, ModelText(len(PIECES), 512, (EOS,), {"eos_token": "</s>"}))


TOKENIZER = make_tokenizer()


def ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def function(
    *stop: str, min_tokens: int = 0, stop_token_ids: Sequence[int] = (), ignore_eos: bool = False, kind: str = "chat"
) -> OutputFunction:
    params = SamplingParams(100, 0, min_tokens=min_tokens, stop_token_ids=tuple(stop_token_ids), ignore_eos=ignore_eos)
    return OutputFunction(TOKENIZER, Submission("r", "m", kind, 0.0, pack_int32(ids("<s>", "▁hello")), params, stop))


def steps(output: OutputFunction, tokens: list[int]) -> list[Delta]:
    """One token an event, without an end."""
    stream = output.start()
    return [stream.feed([token]) for token in tokens]


@pytest.mark.parametrize("stop", [("DEFGHIJ",), ("DEFGHIJ", "HIJX"), ("XX", "DEFGHIJ", "FGHIJK")])
def test_stop_string_over_two_tokens_is_cut_out_exactly(stop: tuple[str, ...]) -> None:
    """BEST-12."""
    tokens = ids("ABC", "▁DEF", "GHIJ", "a")
    deltas = steps(function(*stop), tokens)
    assert [delta.text for delta in deltas] == ["ABC", " ", "", ""]
    assert deltas[2].finish_reason == deltas[3].finish_reason == FinishReason.STOP
    assert deltas[2].stop_reason == "DEFGHIJ"
    assert deltas[2].stop_at == deltas[3].num_tokens == 3, "tokens past the stop string are not counted"
    assert function(*stop).whole(tokens, EndReason.LENGTH).text == "ABC "


def test_stop_string_of_two_words_over_three_tokens() -> None:
    tokens = ids("a", "▁hello", "▁", "GHIJ", "b")
    whole = function("hello GHIJ").whole(tokens, EndReason.LENGTH)
    assert (whole.text, whole.finish_reason, whole.num_tokens) == ("a ", "stop", 4)


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (("bcde", "bc"), "a", "bc"),  # the one that completes first wins, although it does not begin first
        (("abcdX", "cd"), "ab", "cd"),
        (("cd", "bcd"), "a", "bcd"),  # both end here: the longest
        (("e", "bcde"), "a", "bcde"),
    ],
)
def test_of_overlapping_stop_strings_the_one_that_completes_first_wins(
    stops: tuple[str, ...], text: str, stop: str
) -> None:
    for order in (stops, stops[::-1]):
        deltas = steps(function(*order), ids(*"abcdefg"))
        assert ("".join(delta.text for delta in deltas), deltas[-1].stop_reason) == (text, stop)


def test_no_delay_while_no_stop_string_has_begun() -> None:
    """Cases 34 and 35: a long stop string delays nothing that does not begin it."""
    tokens = ids(*"thequickbrownfox")
    deltas = steps(function("Z" * 10, "Y" * 900), tokens)
    assert [delta.text for delta in deltas] == list("thequickbrownfox")


def test_a_beginning_that_breaks_off_is_shown_at_once() -> None:
    deltas = steps(function("aab"), ids(*"aaaac"))
    assert [delta.text for delta in deltas] == ["", "", "a", "a", "aac"]


def test_held_text_comes_with_the_end() -> None:
    stream = function("ab").start()
    assert stream.feed(ids("x", "a")).text == "x"
    assert stream.feed(ids("</s>"), EndReason.EOS) == Delta("a", 3, FinishReason.STOP)


def test_stop_string_wins_over_a_later_length() -> None:
    whole = function("b").whole(ids(*"abc"), EndReason.LENGTH)
    assert (whole.text, whole.finish_reason, whole.num_tokens, whole.stop_at) == ("a", "stop", 2, 2)


def test_stop_string_in_the_text_that_the_end_sets_free() -> None:
    """The last character is a byte run, final only at the end: still a stop string."""
    whole = function("é").whole(ids("a", "<0xC3>", "<0xA9>"), EndReason.LENGTH)
    assert (whole.text, whole.finish_reason, whole.stop_reason, whole.stop_at) == ("a", "stop", "é", 3)


def test_stop_strings_wait_for_min_tokens() -> None:
    deltas = steps(function("b", min_tokens=4), ids(*"abcbd"))
    assert [delta.text for delta in deltas] == ["a", "b", "c", "", ""]
    assert deltas[3].finish_reason == "stop" and deltas[3].num_tokens == 4
    begun_before = steps(function("bc", min_tokens=3), ids(*"abcd"))
    assert "".join(delta.text for delta in begun_before) == "a"
    overlapping = steps(
        function("aa", min_tokens=3), ids(*"aaab")
    )  # the first match is passed over, not its second half
    assert [delta.text for delta in overlapping] == ["", "a", "", ""]
    assert overlapping[2].stop_at == 3


def test_after_the_finish_nothing_is_shown_and_the_finish_is_repeated() -> None:
    stream = function("b").start()
    first = stream.feed(ids("a", "b"))
    assert stream.feed(ids("c"), EndReason.LENGTH) == Delta("", 2, first.finish_reason, "b", 2)
    assert stream.close().text == ""


@pytest.mark.parametrize(
    ("end", "finish"),
    [
        (EndReason.EOS, "stop"),
        (EndReason.STOP_TOKEN, "stop"),
        (EndReason.LENGTH, "length"),
        (EndReason.ERROR, "error"),
    ],
)
def test_finish_reasons(end: EndReason, finish: str) -> None:
    assert function().whole(ids("a", "</s>"), end).finish_reason == finish


def test_the_ending_token_counts_but_has_no_text() -> None:
    (stop,) = ids("b")
    output = function(stop_token_ids=[stop])
    whole = output.whole(ids("a", "b"), EndReason.STOP_TOKEN)
    assert whole == Delta("a", 2, FinishReason.STOP, stop_reason=stop)
    stream = output.start()
    assert stream.feed(ids("a", "b")).text == "a", "also if the end comes in an event of its own"
    assert stream.feed([], EndReason.STOP_TOKEN) == Delta("", 2, FinishReason.STOP, stop_reason=stop)


def test_stop_token_before_min_tokens_is_text() -> None:
    output = function(stop_token_ids=ids("b"), min_tokens=2)
    assert output.whole(ids("b", "a", "b"), EndReason.STOP_TOKEN).text == "ba"


def test_special_tokens_have_no_text_also_in_the_middle() -> None:
    output = function(ignore_eos=True)
    assert output.whole(ids("a", "</s>", "▁hello", "<s>", "b"), EndReason.LENGTH).text == "a hellob"


def test_a_completion_keeps_the_space_that_an_answer_loses() -> None:
    """prompt + text must be the text of prompt + output (BEST-11 kind)."""
    output = ids("▁world", "▁hello")
    prompt = ids("▁hello")
    continued = function(kind="completion").whole(output, EndReason.LENGTH).text
    assert TOKENIZER.decode(prompt) + continued == TOKENIZER.decode(prompt + output)
    assert function(kind="chat").whole(output, EndReason.LENGTH).text == TOKENIZER.decode(output) == "world hello"


def test_resume_gives_what_is_missing_from_any_count() -> None:
    tokens = ids("a", "<0xC3>", "<0xA9>", "▁hello", *"xyz", "</s>")
    output = function("xyZ")
    whole = output.whole(tokens, EndReason.EOS)
    assert whole.text == "aé helloxyz"
    for received in range(len(tokens) + 1):
        before = "".join(delta.text for delta in steps(output, tokens[:received]))
        stream, rest = output.resume_from(received, tokens, EndReason.EOS)
        assert before + rest.text == whole.text
        assert (rest.num_tokens, rest.finish_reason) == (8, "stop")
        assert stream.is_finished
    stream, rest = output.resume_from(2, tokens[:4])
    assert (rest.text, rest.finish_reason) == ("é hello", None)
    assert stream.feed(tokens[4:], EndReason.EOS).text == "xyz"


def test_an_aborted_stream_gives_its_held_text_without_a_finish() -> None:
    stream = function("bc").start()
    stream.feed(ids("a", "b"))
    assert stream.close() == Delta("b", 2)


def test_many_long_stop_strings_are_prepared_quickly_and_in_little_memory() -> None:
    stops = StopStrings(tuple("ab" * 511 + chr(65 + i) for i in range(16)))
    assert sum(pattern.borders.itemsize * len(pattern.borders) for pattern in stops.patterns) < 50_000
    scanner = stops.start()
    assert scanner.push("ab" * 511).text == ""
    assert scanner.push("b").text == "ab" * 511 + "b"
