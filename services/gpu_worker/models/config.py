"""What serving must know of a model, and what the native decoder must know beyond that; `families` reads it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of vocabulary, activations and KV cache, and where rows end: all that the engine asks of any model."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    """The longest row."""
    dtype: str
    """As stored: the `dtype` of the folder."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is `default`, `linear`, `llama3`, `yarn` or `longrope`; rope.py has the formulas."""

    kind: str
    theta: float
    rotary_dim: int
    """The first dimensions of a head, which rotate; the rest stays. Even."""
    factor: float = 1.0
    original_max_positions: int = 8192
    attention_factor: float = 1.0
    """Factor on cosines and sines."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Of yarn: whether the ramp's ends are whole dimensions."""
    divisors: tuple[float, ...] = ()
    """Of longrope: one per frequency."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ between the layers of one model."""

    rope: RopeConfig
    window: int | None
    """Most tokens that a token attends to, itself included; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Dimensions and switches of the native decoder."""

    num_heads: int
    layers: tuple[LayerConfig, ...]
    """[num_layers]"""
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_scale: float
    """Factor on the attention scores."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each query and key head before the rotation."""
    post_norms: bool = False
    """RMSNorm also of what attention and MLP add to the residual."""
    norm_plus_one: bool = False
    """Norm weights are stored minus one, and applied in float32."""
    activation: str = "silu"
    """Of the gate: `silu` or `gelu_tanh`."""
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    fused_names: bool = False
    """The weights have `qkv_proj` and `gate_up_proj` instead of their parts."""
