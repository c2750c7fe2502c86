"""What the native path must know of a decoder of the Llama family, read from a Transformers `config.json`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is `default`, `linear` or `llama3`."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and switches of one model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """As stored: the `dtype` of the folder."""
    eos_token_ids: tuple[int, ...]

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


def _llama(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    _require(raw.get("hidden_act", "silu") == "silu", f"hidden_act {raw.get('hidden_act')!r} is not supported")
    hidden_size, num_heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    num_kv_heads = int(raw.get("num_key_value_heads") or num_heads)
    _require(num_heads % num_kv_heads == 0, f"{num_heads} attention heads for {num_kv_heads} key-value heads")
    return ModelConfig(
        model_type=str(raw["model_type"]),
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(raw.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        eos_token_ids=eos_token_ids,
    )


READERS: dict[str, Callable[[Mapping[str, Any], tuple[int, ...]], ModelConfig]] = {"llama": _llama}
"""Model types of the native path. A relative of Llama is one more reader here, not one more model."""

ARCHITECTURES: dict[str, str] = {"LlamaForCausalLM": "llama"}
"""For folders that name their architecture but not their type."""


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Read a model's configuration.

    Args:
        raw: the content of `config.json`.
        generation: the content of `generation_config.json`, empty if absent; its EOS ids win.

    Raises:
        ConfigError: an unknown architecture, an unsupported variant or a missing field.
    """
    known = [ARCHITECTURES[name] for name in raw.get("architectures") or () if name in ARCHITECTURES]
    model_type = raw.get("model_type") or (known[0] if known else None)
    reader = READERS.get(model_type or "")
    if reader is None:
        named = f"model type {model_type!r} (architectures {raw.get('architectures')})"
        raise ConfigError(f"{named} is not supported; supported: {', '.join(sorted(READERS))}")
    eos = generation.get("eos_token_id")
    return reader({**raw, "model_type": model_type}, _token_ids(eos if eos is not None else raw.get("eos_token_id")))


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    """Transformers 5 says `rope_parameters`; older folders say `rope_theta` and `rope_scaling`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    _require(kind in ("default", "linear", "llama3"), f"rope type {kind!r} is not supported")
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0
    return RopeConfig(
        kind=kind,
        theta=float(theta),
        factor=float(scaling.get("factor", 1.0)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_max_positions=int(
            scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 8192)
        ),
    )


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _integer(raw: Mapping[str, Any], name: str) -> int:
    _require(isinstance(raw.get(name), int), f"config.json: {name} is missing or no integer")
    return int(raw[name])


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
