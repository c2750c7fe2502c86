"""Decoders of the Llama family: pre-norm, rotary attention with grouped heads, gated MLP; variants by configuration."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.cache_write.api import cache_write
from kernels.linear.api import Linear, pack_linear
from kernels.paged_attention.api import AttentionBatch, paged_attention
from kernels.rms_norm.api import rms_norm
from kernels.rope.api import rope, rope_tables
from kernels.silu_mul.api import silu_mul
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.rope import inverse_frequencies
from services.gpu_worker.models.weights import WeightReader


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The flat token batch of one step, on the model's device."""

    token_ids: torch.Tensor
    """[num_tokens] int64."""
    positions: torch.Tensor
    """[num_tokens] int64."""
    slot_mapping: torch.Tensor
    """[num_tokens] int64."""
    attention: AttentionBatch
    sample_at: torch.Tensor | None
    """[num_samples] int64: the tokens whose successor is wanted; None for all of them in order."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block."""

    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Weights on one device and the forward pass over a flat token batch."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightReader,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        """Of activations and KV cache."""
        self.device = device
        self.attention_s = 0.0
        """Seconds of the last pass that were attention. On a GPU, where calls return early: that launched it."""
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = weights.get("model.embed_tokens.weight", vocabulary)
        self._norm = weights.get("model.norm.weight", (config.hidden_size,))
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        self._head = pack_linear(self.embedding if tied else weights.get("lm_head.weight", vocabulary))
        self._layers: list[Layer] = []
        for index in range(config.num_layers):
            self._layers.append(_read_layer(config, weights, f"model.layers.{index}."))
            if on_progress is not None:
                on_progress((index + 1) / config.num_layers)

    @property
    def fingerprint(self) -> str:
        """Numerics: equal fingerprints continue a request with the same tokens."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.device.type}-{dtype}-linear:{self._head.name}-attention:torch"

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> torch.Tensor:
        """Run the step, write its keys and values to `cache`.

        Returns:
            Logits [num_samples, vocab_size], float32.
        """
        self.attention_s = 0.0
        tables = rope_tables(inputs.positions, self._inv_freq, self.dtype)
        hidden = torch.nn.functional.embedding(inputs.token_ids, self.embedding)
        for index, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.input_norm, self.config.rms_norm_eps)
            attended = self._attention(layer.qkv(normed), tables, cache.layer(index), inputs)
            if index == len(self._layers) - 1 and inputs.sample_at is not None:
                # All keys and values are written: from here on only sampled tokens matter.
                attended, hidden = attended[inputs.sample_at], hidden[inputs.sample_at]
                if not len(hidden):
                    break
            hidden = hidden + layer.out(attended)
            normed = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps)
            hidden = hidden + layer.down(silu_mul(layer.gate_up(normed)))
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size, device=self.device)
        return self._head(rms_norm(hidden, self._norm, self.config.rms_norm_eps)).float()

    def _attention(
        self,
        qkv: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: tuple[torch.Tensor, torch.Tensor],
        inputs: ForwardInputs,
    ) -> torch.Tensor:
        """Fused projection [num_tokens, (heads + 2 * kv_heads) * head_dim] -> [num_tokens, heads * head_dim]."""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        rotated = rope(heads[:, : config.num_heads + config.num_kv_heads], *tables)
        query, key = rotated.split((config.num_heads, config.num_kv_heads), dim=1)
        cache_write(key, heads[:, -config.num_kv_heads :], *kv, inputs.slot_mapping)
        started = time.perf_counter()
        out = paged_attention(query, *kv, inputs.attention, scale=config.attention_scale)
        self.attention_s += time.perf_counter() - started
        return out.view(len(qkv), -1)


def _read_layer(config: ModelConfig, weights: WeightReader, prefix: str) -> Layer:
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return Layer(
        input_norm=weights.get(prefix + "input_layernorm.weight", (hidden,)),
        qkv=_fused(
            weights,
            (attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            (heads, kv_heads, kv_heads),
            hidden,
            config.attention_bias,
        ),
        out=_fused(weights, (attention + "o_proj",), (hidden,), heads, config.attention_bias),
        mlp_norm=weights.get(prefix + "post_attention_layernorm.weight", (hidden,)),
        gate_up=_fused(
            weights, (mlp + "gate_proj", mlp + "up_proj"), (intermediate, intermediate), hidden, config.mlp_bias
        ),
        down=_fused(weights, (mlp + "down_proj",), (hidden,), intermediate, config.mlp_bias),
    )


def _fused(
    weights: WeightReader, names: tuple[str, ...], outputs: tuple[int, ...], inputs: int, has_bias: bool
) -> Linear:
    """One projection whose outputs are those of `names`, side by side."""
    weight = weights.joined(tuple(f"{name}.weight" for name in names), tuple((size, inputs) for size in outputs))
    bias = None
    if has_bias:
        bias = weights.joined(tuple(f"{name}.bias" for name in names), tuple((size,) for size in outputs))
    return pack_linear(weight, bias)
