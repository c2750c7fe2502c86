"""What a model folder says about its text: one reading of its JSON files, without Transformers."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.context_length import context_length
from shared.errors import ConfigError

DEFAULT_MAX_MODEL_LEN = 2048
"""For a model whose configuration names no context length."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelText:
    """The facts that tokenizing, rendering and validating need, besides the tokenizer itself."""

    vocab_size: int
    """Rows of the model's embedding: every token id of a request is below it."""
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    special_tokens: dict[str, str] = field(default_factory=dict)
    """`bos_token` → its text, and so on: what chat templates see."""
    chat_template: str | None = None


def read_model_text(folder: Path, *, tokenizer_size: int) -> ModelText:
    """Read `folder`.

    Raises:
        ConfigError: a file is missing or is not what it should be.
    """
    config = _read_json(folder / "config.json", required=True)
    config = {**config, **_object(config.get("text_config"))}
    generation = _read_json(folder / "generation_config.json")
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    eos = generation.get("eos_token_id")
    return ModelText(
        vocab_size=_positive(config.get("vocab_size"), tokenizer_size),
        max_model_len=context_length(config) or DEFAULT_MAX_MODEL_LEN,
        eos_token_ids=_token_ids(config.get("eos_token_id") if eos is None else eos),
        special_tokens=_special_tokens(tokenizer_config),
        chat_template=_chat_template(folder, tokenizer_config),
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ConfigError(f"{path}: missing")
        return {}
    try:
        return _object(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _positive(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list of ids or none."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(token for token in values if isinstance(token, int)))


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Special tokens are written as a string or as an object with `content`."""
    values = {name: tokenizer_config.get(name) for name in _SPECIAL_NAMES}
    contents = {name: _object(value).get("content", value) for name, value in values.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {_object(entry).get("name"): _object(entry).get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
