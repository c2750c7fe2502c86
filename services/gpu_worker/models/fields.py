"""Fields of a Transformers `config.json`, read with their name in the error."""

from collections.abc import Mapping
from typing import Any

from shared.errors import ConfigError

Raw = Mapping[str, Any]


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def integer(raw: Raw, name: str) -> int:
    """A field that must be there, above 0."""
    value = raw.get(name)
    require(isinstance(value, int) and value > 0, f"config.json: {name} is missing or no positive integer")
    return int(raw[name])


def optional_float(raw: Raw, name: str) -> float | None:
    """A field that may be absent or null, else above 0."""
    value = raw.get(name)
    require(value is None or value > 0, f"config.json: {name} {value!r} is not above 0")
    return None if value is None else float(value)


def with_text_part(raw: Raw) -> Raw:
    """The fields of a model that does more than text, with those of its text part over them."""
    return {**raw, **(raw.get("text_config") or {})}


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, a list of ids or none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def end_ids(raw: Raw, generation: Raw) -> tuple[int, ...]:
    """EOS ids: those of `generation_config.json` win over those of `config.json`."""
    eos = generation.get("eos_token_id")
    return token_ids(with_text_part(raw).get("eos_token_id") if eos is None else eos)


def stored_dtype_name(raw: Raw) -> str:
    """The dtype of the weights, as Transformers 5 and older ones call it; that of the text part wins."""
    raw = with_text_part(raw)
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
