"""E is a function: any cut of the tokens into events, resumed anywhere, gives the same text: `decode` of all."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from services.gateway.output.output_function import Delta, OutputFunction
from services.gateway.text.model_files import ModelText
from services.gateway.text.tokenizer import TextTokenizer
from shared.messages import EndReason, FinishReason, Submission
from shared.packing import pack_int32
from shared.sampling import SamplingParams
from tests.property.examples import at_least, counted

CORPUS = [
    "ABC DEFGHIJ and the quick brown fox, said: don't stop here. Is it the end?",
    "Ünïcödé café naïve — “quoted” … 中文字符 日本語 한국어 ไทย עִבְרִית 🇩🇪 👩‍👩‍👧‍👦 👍🏽",
    "def f(x):\n    return x + 1\n\n\n# indented\t\ttabs   and  spaces",
]
HARD_TEXTS = [
    "🇩🇪🇫🇷",
    "👩‍👩‍👧‍👦 family",
    "👍🏽👍🏿",
    "안녕하세요 세계",
    "שָׁלוֹם עֲלֵיכֶם",
    "สวัสดีชาวโลก",
    "𠀀𠮷𪚥",
    "e\u0301a\u0308o\u0303",
]
END = 1
SPECIALS = ["<unk>", "</s>", "<s>", "<|tool|>"]
UNICODE = "".join(sorted({character for text in CORPUS for character in text}))


def _wrap(tokenizer: Tokenizer) -> TextTokenizer:
    # The model's vocabulary is larger than the tokenizer's, as with padded embeddings: such ids have no text.
    model = ModelText(tokenizer.get_vocab_size() + 3, 1024, (END,), {"eos_token": "</s>"})
    return TextTokenizer(tokenizer, model)


def _specials() -> list[AddedToken]:
    return [AddedToken(content, special=True) for content in SPECIALS]


def byte_level() -> Tokenizer:
    """As GPT-2 and most models since: every token is bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=_specials(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<added é 中>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: words begin with ▁, what is not in the vocabulary is bytes, the first space is stripped."""
    words = [
        "▁",
        "▁the",
        "▁and",
        "▁▁",
        "the",
        "ABC",
        "▁DEF",
        "GHIJ",
        "é",
        "中",
        "▁中文",
        ".",
        ",",
        "\n",
        "▁don",
        "'t",
        " ",
    ]
    letters = [chr(code) for code in range(0x21, 0x7F)]
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(_specials())
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and XLM-R: Unigram with ▁, no bytes."""
    pieces = [*SPECIALS, "▁", "▁the", "▁and", "▁▁", "the", "ABC", "▁DEF", "GHIJ", "é", "▁中文", "▁a▁b", *UNICODE]
    vocabulary = [(piece, -float(index)) for index, piece in enumerate(dict.fromkeys(pieces))]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(_specials())
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: a space before each word, clean-up around punctuation."""
    pieces = [*SPECIALS, "the", "##s", "##'", ".", "?", "don", "'", "##t", "n't", "a", "é", "##中"]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(_specials())
    return tokenizer


def end_of_word() -> Tokenizer:
    """As CLIP and the first GPT: words end with a suffix."""
    pieces = [*SPECIALS, "the</w>", "fox</w>", "s", ".</w>", "é", "a</w>"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens(_specials())
    return tokenizer


def no_decoder() -> Tokenizer:
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    build.__name__: build for build in (byte_level, byte_fallback, metaspace, word_piece, end_of_word, no_decoder)
}


@cache
def tokenizer_of(name: str) -> TextTokenizer:
    return _wrap(BUILDERS[name]())


def byte_token(digits: str) -> int:
    """The id of a byte in `byte_fallback`."""
    token = BUILDERS["byte_fallback"]().token_to_id(f"<0x{digits}>")
    assert token is not None
    return token


def submission(
    *, stop: Sequence[str] = (), min_tokens: int = 0, stop_token_ids: Sequence[int] = (), kind: str = "chat"
) -> Submission:
    params = SamplingParams(4096, 0, min_tokens=min_tokens, stop_token_ids=tuple(stop_token_ids))
    return Submission("r", "m", kind, 0.0, pack_int32([5]), params, tuple(stop))


@st.composite
def token_sequences(draw: st.DrawFn, tokenizer: TextTokenizer) -> list[int]:
    """Random ids, spliced with the ids of real texts and with raw bytes."""
    any_token = st.integers(END + 1, tokenizer.vocab_size - 1)
    noise = st.lists(any_token, min_size=1, max_size=12)
    texts = st.sampled_from(HARD_TEXTS + CORPUS).map(lambda text: tokenizer.encode(text, add_special_tokens=False)[:30])
    parts = draw(st.lists(st.one_of(noise, texts, texts.map(lambda ids: ids[1:-1])), min_size=1, max_size=4))
    return [token for part in parts for token in part if token != END]


@st.composite
def stop_lists(draw: st.DrawFn, text: str) -> list[str]:
    """Stop strings cut from the text, and strings that nearly are."""
    stops = []
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        begin = draw(st.integers(0, max(0, len(text) - 1)))
        cut = text[begin : begin + draw(st.integers(1, 8))]
        stops.append(draw(st.sampled_from([cut, cut + "X", cut[-1:] + cut])))
    return [stop for stop in stops if stop]


CUTS = st.lists(st.integers(0, 100), max_size=8)


def partition(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    """Cut `tokens` at the given places; equal places make empty events."""
    places = sorted(cut % (len(tokens) + 1) for cut in cuts)
    return [tokens[a:b] for a, b in zip([0, *places], [*places, len(tokens)], strict=True)]


def feed_all(function: OutputFunction, events: list[list[int]], end: EndReason) -> tuple[str, Delta]:
    stream = function.start()
    ends = [None] * (len(events) - 1) + [end]
    deltas = [stream.feed(event, event_end) for event, event_end in zip(events, ends, strict=True)]
    return "".join(delta.text for delta in deltas), deltas[-1]


def reference(
    tokenizer: TextTokenizer, function: OutputFunction, tokens: list[int], stops: list[str]
) -> tuple[str, bool]:
    """E by its definition, without any increment: the text after each token, searched again and again."""
    shown = tokenizer.start_detokenizer()
    text, offset = "", 0
    for count, token in enumerate(tokens, start=1):
        offset, text = len(text), text + shown.push(token)
        if count == len(tokens):
            text += shown.flush()
        honoured = count >= function.params.min_tokens
        ends = [
            (end, -len(stop)) for stop in stops for end in range(offset + 1, len(text) + 1) if text[:end].endswith(stop)
        ]
        if honoured and ends:
            end, negative_length = min(ends)
            return text[: end + negative_length], True
    return text, False


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=at_least(60))
@given(data=st.data())
@counted
def test_incremental_text_equals_decode_of_all(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    tokens = data.draw(token_sequences(tokenizer))
    for skip in (True, False):
        detokenizer = tokenizer.start_detokenizer(skip_special_tokens=skip)
        deltas = [detokenizer.push(token) for token in tokens] + [detokenizer.flush()]
        known = [token for token in tokens if token < tokenizer.vocab_size - 3]
        whole = tokenizer.decode(known, skip_special_tokens=skip) if known else ""
        assert "".join(deltas) == whole
        if "\ufffd" not in whole:
            assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("name", BUILDERS)
def test_any_partition_and_any_resume_gives_the_same_output(name: str) -> None:
    tokenizer = tokenizer_of(name)
    happened: Counter[str] = Counter()

    @settings(max_examples=at_least(120))
    @given(data=st.data())
    @counted
    def check(data: st.DataObject) -> None:
        tokens = data.draw(token_sequences(tokenizer))
        stops = data.draw(stop_lists(tokenizer.decode(tokens))) if tokens else []
        min_tokens = data.draw(st.sampled_from([0, 0, 3, len(tokens) // 2]))
        end = data.draw(st.sampled_from([EndReason.LENGTH, EndReason.EOS]))
        if end is EndReason.EOS:
            tokens = [*tokens, END]
        function = OutputFunction(tokenizer, submission(stop=stops, min_tokens=min(min_tokens, len(tokens))))
        whole = function.whole(tokens, end)

        text, last = feed_all(function, partition(tokens, data.draw(CUTS)), end)
        assert text == whole.text
        assert replace(last, text="") == replace(whole, text="")

        received = data.draw(st.integers(0, len(tokens)))
        before = function.start().feed(tokens[:received])
        stream, rest = function.resume_from(received, tokens, end)
        assert before.text + rest.text == whole.text
        assert replace(rest, text="") == replace(whole, text="")
        assert stream.is_finished
        happened["stopped"] += whole.stop_at is not None
        happened["resumed inside"] += 0 < len(before.text) < len(whole.text)

    check()
    assert happened["stopped"] >= 5 and happened["resumed inside"] >= 5, happened


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace"])
def test_output_equals_its_definition(name: str) -> None:
    tokenizer = tokenizer_of(name)
    happened: Counter[str] = Counter()

    @settings(max_examples=at_least(120))
    @given(data=st.data())
    @counted
    def check(data: st.DataObject) -> None:
        tokens = data.draw(token_sequences(tokenizer))
        assume(tokens)
        stops = data.draw(stop_lists(tokenizer.decode(tokens)))
        min_tokens = data.draw(st.integers(0, min(4, len(tokens))))
        function = OutputFunction(tokenizer, submission(stop=stops, min_tokens=min_tokens))
        whole = function.whole(tokens, EndReason.LENGTH)
        text, stopped = reference(tokenizer, function, tokens, stops)
        assert whole.text == text
        assert whole.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        happened[str(whole.finish_reason)] += 1

    check()
    assert happened["stop"] >= 5 and happened["length"] >= 5, happened


@settings(max_examples=at_least(150))
@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
@example(text="aabaab", stops=["aabaaa", "abaab"], cuts=[3])
@counted
def test_holds_back_only_what_could_still_match(text: str, stops: list[str], cuts: list[int]) -> None:
    """Two letters only, so that stop strings overlap themselves and each other."""
    tokenizer = tokenizer_of("byte_fallback")
    letters = {letter: tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ab"}
    function = OutputFunction(tokenizer, submission(stop=stops))
    stream, shown, seen = function.start(), "", ""
    for letter in text:
        delta = stream.feed([letters[letter]])
        shown, seen = shown + delta.text, seen + letter
        if delta.finish_reason:
            break
        could = [
            size
            for size in range(len(seen) + 1)
            for stop in stops
            if size < len(stop) and stop[:size] == seen[len(seen) - size :]
        ]
        assert len(seen) - len(shown) == max(could)
    completed = min(
        (seen_end for seen_end in range(1, len(text) + 1) if text[:seen_end].endswith(tuple(stops))), default=0
    )
    assert stream.is_finished == bool(completed)
    if completed:
        longest = max(len(stop) for stop in stops if text[:completed].endswith(stop))
        assert shown == text[: completed - longest] and stream.num_tokens == completed


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "metaspace"])
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_multibyte_text_one_token_a_step(name: str, text: str) -> None:
    """BEST-10. A model's vocabulary must hold the text, or decoding gives something else (metaspace has no bytes)."""
    tokenizer = tokenizer_of(name)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    function = OutputFunction(tokenizer, submission())
    stream = function.start()
    deltas = [stream.feed([token]).text for token in tokens] + [stream.feed([END], EndReason.EOS).text]
    assert "".join(deltas) == tokenizer.decode(tokens)
    assert "\ufffd" not in "".join(deltas)
    if name != "metaspace":
        assert "".join(deltas) == text


@pytest.mark.parametrize(("first", "second", "whole"), [("F0", "9F", "\ufffd\ufffd"), ("E4", "41", "\ufffd\ufffd")])
def test_unfinished_bytes_come_with_the_end(first: str, second: str, whole: str) -> None:
    """Case 30: bytes that never become a character neither stall the stream nor get lost."""
    tokenizer = tokenizer_of("byte_fallback")
    tokens = [byte_token(byte) for byte in (first, second)]
    assert tokenizer.decode(tokens) == whole
    stream = OutputFunction(tokenizer, submission()).start()
    assert [stream.feed([token]).text for token in tokens] == ["", ""]
    last = stream.feed([END], EndReason.EOS)
    assert last.text == whole and last.finish_reason == FinishReason.STOP


def test_time_is_linear_in_the_number_of_tokens() -> None:
    """Also while bytes are pending and stop strings keep matching half: 32k tokens take about 8 times 4k tokens."""
    tokenizer = tokenizer_of("byte_fallback")
    byte = byte_token("80")
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    function = OutputFunction(tokenizer, submission(stop=["a" * 200 + "b", "X" * 1024]))

    def seconds(tokens: list[int]) -> float:
        stream, begin = function.start(), time.thread_time()
        for token in tokens:
            stream.feed([token])
        stream.feed([], EndReason.LENGTH)
        return time.thread_time() - begin

    for kind in ([byte], [letter], [byte, letter]):
        small = min(seconds(kind * (4096 // len(kind))) for _ in range(3))
        large = seconds(kind * (32768 // len(kind)))
        assert large < 40 * small, (small, large)
        assert small < 1.0


@pytest.mark.model
def test_real_model_vocabulary(model_folder: Path) -> None:
    """The default model's own tokenizer: 300 random sequences."""
    tokenizer = TextTokenizer.from_folder(model_folder)
    rng = random.Random(7)
    for _ in range(300):
        tokens = [rng.randrange(3, tokenizer.vocab_size) for _ in range(rng.randrange(1, 40))]
        function = OutputFunction(tokenizer, submission())
        deltas, _ = feed_all(function, [[token] for token in tokens], EndReason.LENGTH)
        assert deltas == tokenizer.decode(tokens)
