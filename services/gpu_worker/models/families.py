"""The relatives of Llama that the native decoder runs: from a Transformers `config.json` to a `DecoderConfig`.

A family is one function here, not one model more: it says which switches of the decoder its members set.
"""

import math
from collections.abc import Callable
from typing import Any

from services.gpu_worker.models.config import DecoderConfig, LayerConfig, RopeConfig
from services.gpu_worker.models.fields import (
    Raw,
    end_ids,
    integer,
    optional_float,
    require,
    stored_dtype_name,
    with_text_part,
)
from services.gpu_worker.models.rope_fields import read_rope
from shared.context_length import context_length
from shared.errors import ConfigError

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def is_native(raw: Raw) -> bool:
    """Whether the native decoder runs models of this type."""
    return model_type_of(raw) in FAMILIES


def model_type_of(raw: Raw) -> str | None:
    """`model_type`, or what a folder's architecture stands for if it names no type."""
    known = [ARCHITECTURES[name] for name in raw.get("architectures") or () if name in ARCHITECTURES]
    return raw.get("model_type") or (known[0] if known else None)


def parse_config(raw: Raw, generation: Raw) -> DecoderConfig:
    """Read the configuration of a native model.

    Args:
        raw: the content of `config.json`.
        generation: the content of `generation_config.json`, empty if absent; its EOS ids win.

    Raises:
        ConfigError: an unknown type, an unsupported variant or a missing field; the message names the field.
    """
    model_type = model_type_of(raw)
    if model_type not in FAMILIES:
        raise ConfigError(f"model type {model_type!r} is not native; native are {', '.join(FAMILIES)}")
    raw = {**_DEFAULTS[model_type], **with_text_part(raw), "model_type": model_type}
    return FAMILIES[model_type]({**raw, "eos_token_id": end_ids(raw, generation)})


def _llama(raw: Raw) -> DecoderConfig:
    bias = bool(raw.get("attention_bias", False))
    return _decoder(raw, qkv_bias=bias, out_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))


def _mistral(raw: Raw) -> DecoderConfig:
    return _decoder(raw, windows=_everywhere(raw))


def _qwen2(raw: Raw) -> DecoderConfig:
    return _decoder(raw, qkv_bias=True, windows=_upper_layers(raw))


def _qwen3(raw: Raw) -> DecoderConfig:
    bias = bool(raw.get("attention_bias", False))
    return _decoder(raw, qkv_bias=bias, out_bias=bias, qk_norm=True, windows=_upper_layers(raw))


def _phi3(raw: Raw) -> DecoderConfig:
    # Early folders call their long-context embedding "yarn"; it never was.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    if scaling and (scaling.get("rope_type") or scaling.get("type")) == "yarn":
        raw = {**raw, "rope_parameters": {**scaling, "rope_type": "longrope"}}
    return _decoder(raw, fused_names=True, windows=_everywhere(raw))


def _gemma2(raw: Raw) -> DecoderConfig:
    return _gemma(
        raw,
        windows=_by_type(raw, pattern=2),
        attention_soft_cap=optional_float(raw, "attn_logit_softcapping"),
    )


def _gemma3(raw: Raw) -> DecoderConfig:
    require(not raw.get("attn_logit_softcapping"), "config.json: attn_logit_softcapping is not supported for gemma3")
    windows = _by_type(raw, pattern=integer(raw, "sliding_window_pattern"))
    head_dim = integer(raw, "head_dim")
    local = {**raw, "rope_theta": raw.get("rope_local_base_freq"), "rope_scaling": None}
    ropes = {
        _FULL: read_rope(raw, head_dim, layer_type=_FULL, theta=1e6),
        _SLIDING: read_rope(local, head_dim, layer_type=_SLIDING, theta=1e4),
    }
    return _gemma(raw, qk_norm=True, windows=windows, ropes=[ropes[_FULL if w is None else _SLIDING] for w in windows])


def _gemma(raw: Raw, **switches: Any) -> DecoderConfig:
    require(not raw.get("use_bidirectional_attention"), "config.json: use_bidirectional_attention is not supported")
    bias = bool(raw.get("attention_bias", False))
    return _decoder(
        {**raw, "hidden_act": raw.get("hidden_activation") or "gelu_pytorch_tanh"},
        qkv_bias=bias,
        out_bias=bias,
        post_norms=True,
        norm_plus_one=True,
        embedding_scale=math.sqrt(integer(raw, "hidden_size")),
        attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
        logit_soft_cap=optional_float(raw, "final_logit_softcapping"),
        **switches,
    )


FAMILIES: dict[str, Callable[[Raw], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma3": _gemma3,  # the text part of a model that also sees
}
"""By `model_type`."""

_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA3 = {**_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}
_DEFAULTS: dict[str, Raw] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "phi3": {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
}
"""What Transformers assumes where a folder is silent. A field that is there and null is not silent."""

ARCHITECTURES: dict[str, str] = {"LlamaForCausalLM": "llama"}
"""For folders that name their architecture but not their type."""


def _decoder(
    raw: Raw,
    *,
    attention_scale: float | None = None,
    windows: list[int | None] | None = None,
    ropes: list[RopeConfig] | None = None,
    **switches: Any,
) -> DecoderConfig:
    """What all families name alike."""
    require(not raw.get("quantization_config"), "config.json: quantization_config is not supported: give plain weights")
    activation = str(raw.get("hidden_act", "silu"))
    require(activation in _ACTIVATIONS, f"hidden_act {activation!r} is not supported")
    hidden_size, num_heads = integer(raw, "hidden_size"), integer(raw, "num_attention_heads")
    num_layers, num_kv_heads = integer(raw, "num_hidden_layers"), int(raw.get("num_key_value_heads") or num_heads)
    require(num_heads % num_kv_heads == 0, f"{num_heads} attention heads for num_key_value_heads {num_kv_heads}")
    head_dim = int(raw.get("head_dim") or hidden_size // num_heads)
    ropes = ropes or [read_rope(raw, head_dim)] * num_layers
    layers = zip(ropes, windows or [None] * num_layers, strict=True)
    return DecoderConfig(
        model_type=str(raw["model_type"]),
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        layers=tuple(LayerConfig(rope, window) for rope, window in layers),
        max_position_embeddings=context_length(raw) or 2048,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_scale=1.0 / math.sqrt(head_dim) if attention_scale is None else attention_scale,
        activation=_ACTIVATIONS[activation],
        dtype=stored_dtype_name(raw),
        eos_token_ids=raw["eos_token_id"],
        **switches,
    )


# ---------------------------------------------------------------- windows, per layer


def _everywhere(raw: Raw) -> list[int | None]:
    return [_window(raw)] * integer(raw, "num_hidden_layers")


def _upper_layers(raw: Raw) -> list[int | None]:
    """Qwen: if at all, from layer `max_window_layers` on."""
    if not raw.get("use_sliding_window") or raw.get("layer_types"):
        return _by_type({**raw, "sliding_window": raw.get("sliding_window") if raw.get("use_sliding_window") else None})
    first = int(raw["max_window_layers"])
    return [_window(raw) if index >= first else None for index in range(integer(raw, "num_hidden_layers"))]


def _by_type(raw: Raw, pattern: int | None = None) -> list[int | None]:
    """By `layer_types`; without, every layer but each `pattern`-th slides, or none does."""
    count = integer(raw, "num_hidden_layers")
    types = raw.get("layer_types")
    if types is None:
        types = [_SLIDING if pattern and (index + 1) % pattern else _FULL for index in range(count)]
    require(len(types) == count, f"config.json: {len(types)} layer_types for {count} layers")
    unknown = [kind for kind in types if kind not in (_FULL, _SLIDING)]
    require(not unknown, f"config.json: layer_types {unknown} are not supported")
    return [_window(raw) if kind == _SLIDING else None for kind in types]


def _window(raw: Raw) -> int | None:
    window = raw.get("sliding_window")
    require(window is None or window > 0, f"config.json: sliding_window {window!r} is not above 0")
    return None if window is None else int(window)
