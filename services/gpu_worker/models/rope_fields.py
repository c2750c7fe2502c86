"""The rotary embedding in a `config.json`: Transformers 5 says `rope_parameters`, older folders say `rope_theta`,
`rope_scaling` and `partial_rotary_factor`."""

import math

from services.gpu_worker.models.config import RopeConfig
from services.gpu_worker.models.fields import Raw, require

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


def read_rope(raw: Raw, head_dim: int, *, layer_type: str = "full_attention", theta: float = 10000.0) -> RopeConfig:
    """The embedding of the layers of one type.

    Args:
        raw: `config.json`.
        head_dim: of the attention heads.
        layer_type: a key of `rope_parameters`, if these differ by layer.
        theta: for folders that do not name it.

    Raises:
        ConfigError: a kind or a size that is not supported.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    scaling = scaling[layer_type] if isinstance(scaling.get(layer_type), dict) else scaling
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    require(kind in KINDS, f"rope type {kind!r} (rope_parameters) is not supported; supported: {', '.join(KINDS)}")
    share = float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * share)
    fits = rotary_dim % 2 == 0 and 0 < rotary_dim <= head_dim
    require(fits, f"partial_rotary_factor {share} of head_dim {head_dim} gives {rotary_dim} rotary dimensions")
    return RopeConfig(
        kind=kind,
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or theta),
        rotary_dim=rotary_dim,
        factor=_factor(raw, scaling),
        original_max_positions=_original(raw, scaling),
        attention_factor=_attention_factor(kind, raw, scaling),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        divisors=_divisors(scaling, rotary_dim) if kind == "longrope" else (),
    )


def _original(raw: Raw, scaling: Raw) -> int:
    names = (scaling.get("original_max_position_embeddings"), raw.get("original_max_position_embeddings"))
    return int(names[0] or names[1] or raw.get("max_position_embeddings") or 8192)


def _factor(raw: Raw, scaling: Raw) -> float:
    """How much longer contexts became; long-context folders may leave it to the ratio of their lengths."""
    factor = scaling.get("factor")
    if factor is None:
        return float(raw.get("max_position_embeddings") or 1) / _original(raw, scaling) if scaling else 1.0
    return float(factor)


def _attention_factor(kind: str, raw: Raw, scaling: Raw) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    given, factor = scaling.get("attention_factor"), _factor(raw, scaling)
    if given is not None or factor <= 1.0:
        return float(1.0 if given is None else given)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(_original(raw, scaling)))
    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return _magnitude(factor, over) / _magnitude(factor, under) if over and under else _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _divisors(scaling: Raw, rotary_dim: int) -> tuple[float, ...]:
    """Of rows within the original length: the only ones that are served."""
    values = scaling.get("short_factor")
    sound = isinstance(values, list) and len(values) == rotary_dim // 2
    require(sound, f"rope_parameters: short_factor must have {rotary_dim // 2} numbers")
    return tuple(float(value) for value in values or ())
