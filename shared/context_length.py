"""How long a row a model was made for, by its `config.json`. Gateway, worker and command line must agree on it."""

from collections.abc import Mapping
from typing import Any

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


def context_length(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest row, or None if the configuration does not say.

    A model with the rotary embedding `longrope` changes all of its frequencies when a row grows beyond the original
    length, so what was computed before would have to be computed again: its rows end there instead.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    values = (config.get(name) for name in _NAMES)
    length = next((value for value in values if isinstance(value, int) and value > 0), None)
    return _original_length(config) or length


def _original_length(config: Mapping[str, Any]) -> int | None:
    """Of a model with `longrope`, by any of its names; None for others."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, dict) else {}
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind not in ("longrope", "su") and not (kind == "yarn" and config.get("model_type") == "phi3"):
        return None
    name = "original_max_position_embeddings"
    length = scaling.get(name) or config.get(name)
    return length if isinstance(length, int) else None
