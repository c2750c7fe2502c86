"""Weights of the native decoder, and how they are named in a folder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.linear.api import Linear, pack_gated_linear, pack_linear
from services.gpu_worker.models.config import DecoderConfig, LayerConfig
from services.gpu_worker.models.weights import Weights


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block. Norm weights are as `rms_norm` takes them: in the model's dtype, or in float32."""

    config: LayerConfig
    input_norm: torch.Tensor
    qkv: Linear
    """Query, key and value heads side by side."""
    query_norm: torch.Tensor | None
    """[head_dim]"""
    key_norm: torch.Tensor | None
    """[head_dim]"""
    out: Linear
    post_attention_norm: torch.Tensor | None
    """Of what attention adds to the residual."""
    mlp_norm: torch.Tensor
    gated: Linear
    """Of the MLP: the activated gate times the other half."""
    down: Linear
    post_mlp_norm: torch.Tensor | None
    """Of what the MLP adds to the residual."""

    @property
    def projections(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gated, self.down


def read_layer(config: DecoderConfig, weights: Weights, index: int, prefix: str, *, is_int8: bool) -> Layer:
    """Weights of block `index`, whose names begin with `prefix`; projections are rounded to int8 if told so.

    Raises:
        ConfigError: a tensor is missing or has another shape.
    """
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    after_attention, before_mlp = _norm_names(config)
    pack = partial(pack_linear, is_int8=is_int8)
    return Layer(
        config=config.layers[index],
        input_norm=read_norm(config, weights, prefix + "input_layernorm", hidden),
        qkv=_fused(
            weights,
            [attention + name for name in (["qkv_proj"] if config.fused_names else ["q_proj", "k_proj", "v_proj"])],
            [heads + 2 * kv_heads] if config.fused_names else [heads, kv_heads, kv_heads],
            hidden,
            config.qkv_bias,
            pack,
        ),
        query_norm=read_norm(config, weights, attention + "q_norm", config.head_dim) if config.qk_norm else None,
        key_norm=read_norm(config, weights, attention + "k_norm", config.head_dim) if config.qk_norm else None,
        out=_fused(weights, [attention + "o_proj"], [hidden], heads, config.out_bias, pack),
        post_attention_norm=read_norm(config, weights, prefix + after_attention, hidden) if after_attention else None,
        mlp_norm=read_norm(config, weights, prefix + before_mlp, hidden),
        gated=_fused(
            weights,
            [mlp + name for name in (["gate_up_proj"] if config.fused_names else ["gate_proj", "up_proj"])],
            [2 * intermediate] if config.fused_names else [intermediate, intermediate],
            hidden,
            config.mlp_bias,
            partial(pack_gated_linear, activation=config.activation, is_int8=is_int8),
        ),
        down=_fused(weights, [mlp + "down_proj"], [hidden], intermediate, config.mlp_bias, pack),
        post_mlp_norm=(
            read_norm(config, weights, prefix + "post_feedforward_layernorm", hidden) if config.post_norms else None
        ),
    )


def read_norm(config: DecoderConfig, weights: Weights, name: str, size: int) -> torch.Tensor:
    """The weight of an RMSNorm, as `rms_norm` takes it."""
    weight = weights.get(f"{name}.weight", (size,))
    return 1.0 + weight.float() if config.norm_plus_one else weight


def _norm_names(config: DecoderConfig) -> tuple[str | None, str]:
    """Of the norms after attention and before the MLP. A block with two norms calls the second one after what precedes
    it; a block with four, after what it is applied to."""
    if config.post_norms:
        return "post_attention_layernorm", "pre_feedforward_layernorm"
    return None, "post_attention_layernorm"


def _fused(
    weights: Weights,
    names: list[str],
    outputs: list[int],
    inputs: int,
    has_bias: bool,
    pack: Callable[..., Linear],
) -> Linear:
    """One projection whose outputs are those of `names`, side by side."""
    weight = weights.projection([f"{name}.weight" for name in names], [(size, inputs) for size in outputs])
    bias = weights.joined([f"{name}.bias" for name in names], [(size,) for size in outputs]) if has_bias else None
    return pack(weight, bias)
