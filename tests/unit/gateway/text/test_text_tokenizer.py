"""The tokenizer as a gateway uses it: what a folder says, what threads may do."""

import json
import threading
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.gateway.text.tokenizer import TextTokenizer
from shared.errors import ConfigError, InvalidRequest


def small_tokenizer() -> Tokenizer:
    """Byte-level without merges: one token per byte; BOS before each text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({letter: index + 2 for index, letter in enumerate(alphabet)} | {"<s>": 0, "</s>": 1}, [])
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def write_model(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    small_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_reads_vocabulary_context_and_endings_from_the_folder(tmp_path: Path) -> None:
    config = {"vocab_size": 300, "max_position_embeddings": 77, "eos_token_id": 5}
    generation = {"eos_token_id": [1, 7, 1]}
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "chat_template": "{{ messages }}"}
    tokenizer = TextTokenizer.from_folder(
        write_model(tmp_path, config, generation_config=generation, tokenizer_config=tokens)
    )
    assert (tokenizer.vocab_size, tokenizer.max_model_len) == (300, 77)
    assert tokenizer.eos_token_ids == (1, 7), "generation_config wins over config"
    assert tokenizer.bos_token_id == 0
    assert tokenizer.special_token_ids == {0, 1}
    assert tokenizer.render_chat([]) == "[]"


@pytest.mark.parametrize(
    ("config", "tokens", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token": "</s>"}, (5,)),
        ({"eos_token_id": None}, {"eos_token": "</s>"}, (1,)),
        ({"text_config": {"eos_token_id": [3, 4]}}, {}, (3, 4)),
        ({}, {}, ()),
    ],
)
def test_endings_fall_back(
    tmp_path: Path, config: dict[str, Any], tokens: dict[str, Any], expected: tuple[int]
) -> None:
    tokenizer = TextTokenizer.from_folder(write_model(tmp_path, config, tokenizer_config=tokens))
    assert tokenizer.eos_token_ids == expected


def test_default_template_is_taken_from_a_list_and_the_file_wins(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    write_model(tmp_path, {}, tokenizer_config={"chat_template": named})
    message = [{"role": "user", "content": "x"}]
    assert TextTokenizer.from_folder(tmp_path).render_chat(message) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert TextTokenizer.from_folder(tmp_path).render_chat(message) == "F"


@pytest.mark.parametrize("broken", ["config.json", "tokenizer.json"])
def test_a_missing_or_broken_file_is_a_configuration_error(tmp_path: Path, broken: str) -> None:
    write_model(tmp_path, {})
    (tmp_path / broken).write_text("{")
    with pytest.raises(ConfigError, match=broken):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / broken).unlink()
    with pytest.raises(ConfigError, match=broken):
        TextTokenizer.from_folder(tmp_path)


def test_a_model_without_template_refuses_chats(tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_folder(write_model(tmp_path, {}))
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    """A tokenizer.json that was saved while training truncates silently."""
    write_model(tmp_path, {})
    inner = small_tokenizer()
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(TextTokenizer.from_folder(tmp_path).encode("abcdefgh", add_special_tokens=False)) == 8


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_unicode_is_not_normalised(model_folder: Path, form: str) -> None:
    """Case 65: what comes in is what the tokenizer sees."""
    text = unicodedata.normalize(form, "é ü ạ̈ 한국")  # type: ignore[arg-type]
    tokenizer = TextTokenizer.from_folder(model_folder)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens == Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(tokens) == text


def test_least_tokens_is_a_lower_bound(model_folder: Path) -> None:
    tokenizer = TextTokenizer.from_folder(model_folder)
    for text in (" " * 5000, "the " * 2000, "=" * 3000, "é" * 999, "\n" * 1000):
        assert 0 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_many_threads_encode_and_other_threads_run_meanwhile(model_folder: Path) -> None:
    """Tokenizing a large text must not stop the event loop's thread: the GIL is released."""
    tokenizer = TextTokenizer.from_folder(model_folder)
    text = "hello world, and some more " * 20_000
    expected = tokenizer.encode(text, add_special_tokens=False)
    turns, done = 0, threading.Event()

    def spin() -> None:
        nonlocal turns
        while not done.is_set():
            time.sleep(0.001)
            turns += 1

    spinner = threading.Thread(target=spin)
    spinner.start()
    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda _: tokenizer.encode(text, add_special_tokens=False), range(4)))
        seconds = time.perf_counter() - begin
    finally:
        done.set()
        spinner.join()
    assert all(result == expected for result in results)
    assert turns > seconds * 1000 / 50, "a turn at least every 50 ms on average"
