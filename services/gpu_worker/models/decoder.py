"""The native decoder: pre-norm, rotary attention with grouped heads, gated MLP; variants by configuration."""

import time
from collections.abc import Callable

import torch

from kernels.cache_write.api import HeadNorms, rope_cache_write
from kernels.linear.api import Weight, pack_linear
from kernels.paged_attention.api import implementation, paged_attention
from kernels.paged_attention.native import NativeBatch
from kernels.rms_norm.api import rms_norm
from kernels.rope.api import rope_tables
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.models.config import DecoderConfig, RopeConfig
from services.gpu_worker.models.layers import Layer, read_layer, read_norm
from services.gpu_worker.models.model import ForwardInputs, largest_of
from services.gpu_worker.models.native_step import native_step, step_arrays
from services.gpu_worker.models.rope import inverse_frequencies
from services.gpu_worker.models.weights import Weights, prefix_of

Tables = dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]]
"""Cosines and sines of a step, once per kind of layer."""

_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
"""Of the decoder's tensors: alone in its folder, or beside a vision tower as newer and older folders name it."""


class DecoderModel:
    """A model of the Llama family; `Model` says what its members mean."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        dtype: torch.dtype,
        stored_dtype: torch.dtype,
        device: torch.device,
        is_int8: bool = False,
        max_model_len: int = 0,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self.config = config
        self.num_positions = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
        self.dtype = dtype
        self.stored_dtype = stored_dtype
        self.device = device
        self.attention_s = 0.0
        self._inv_freq = {layer.rope: inverse_frequencies(layer.rope).to(device) for layer in config.layers}
        # Rounded to the dtype before the product: that is how these models were trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
        vocabulary = (config.vocab_size, config.hidden_size)
        prefix = prefix_of(weights, "embed_tokens.weight", _PREFIXES)
        names = f"{prefix}embed_tokens.weight", "lm_head.weight"
        self.embedding = weights.get(names[0], vocabulary)
        self._norm = read_norm(config, weights, f"{prefix}norm", config.hidden_size)
        tied = config.tie_word_embeddings or "lm_head.weight" not in weights
        head: Weight = self.embedding
        if weights.keeps_blocks or not tied:
            head = weights.projection([names[0 if tied else 1]], [vocabulary])
        self._head = pack_linear(head, is_int8=is_int8)
        self._layers: list[Layer] = []
        for index in range(config.num_layers):
            self._layers.append(read_layer(config, weights, index, f"{prefix}layers.{index}.", is_int8=is_int8))
            if on_progress is not None:
                on_progress((index + 1) / config.num_layers)

        weights_of = (self._layers, self.embedding, self._norm, self._head)
        self.native = native_step(config, *weights_of, self._inv_freq, self.num_positions)

    @property
    def is_native(self) -> bool:
        """Whether a step over a packed cache is one call of the C++ kernels."""
        return self.native is not None

    @property
    def fingerprint(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        step = "-one-call" if self.is_native else ""
        products = "+".join(sorted({self._head.name, *(p.name for layer in self._layers for p in layer.projections)}))
        return f"{self.device.type}-{dtype}-linear:{products}-attention:{implementation(self.device)}{step}"

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> torch.Tensor:
        if self.native is not None and isinstance(inputs.attention, NativeBatch):
            logits = self.native.logits(step_arrays(inputs, inputs.attention), cache.data)
            self.attention_s = self.native.attention_s
            return logits
        return self.forward_by_operations(inputs, cache)

    def forward_largest(self, inputs: ForwardInputs, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        if self.native is not None and isinstance(inputs.attention, NativeBatch):
            largest = self.native.largest(step_arrays(inputs, inputs.attention), cache.data)
            self.attention_s = self.native.attention_s
            return largest
        return largest_of(self.forward_by_operations(inputs, cache))

    def forward_by_operations(self, inputs: ForwardInputs, cache: KVCache) -> torch.Tensor:
        """As `forward`, a kernel at a time."""
        self.attention_s = 0.0
        tables = self._tables(inputs.positions)
        hidden = self._embed(inputs.token_ids)
        for index, layer in enumerate(self._layers):
            normed = self._normed(hidden, layer.input_norm)
            attended = self._attention(layer, layer.qkv(normed), tables, cache.layer(index), inputs)
            if index == len(self._layers) - 1 and inputs.sample_at is not None:
                # All keys and values are written: from here on only sampled tokens matter.
                attended, hidden = attended[inputs.sample_at], hidden[inputs.sample_at]
                if not len(hidden):
                    return torch.empty(0, self.config.vocab_size, device=self.device)
            hidden = hidden + self._normed_if(layer.out(attended), layer.post_attention_norm)
            normed = self._normed(hidden, layer.mlp_norm)
            hidden = hidden + self._normed_if(layer.down(layer.gated(normed)), layer.post_mlp_norm)
        return self._logits(hidden)

    def _tables(self, positions: torch.Tensor) -> Tables:
        return {
            config: rope_tables(positions, frequencies, self.dtype, scale=config.attention_factor)
            for config, frequencies in self._inv_freq.items()
        }

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.embedding(token_ids, self.embedding)
        if self.config.embedding_scale == 1.0:
            return hidden
        return hidden * self._embedding_scale

    def _attention(
        self,
        layer: Layer,
        qkv: torch.Tensor,
        tables: Tables,
        kv: tuple[torch.Tensor, torch.Tensor],
        inputs: ForwardInputs,
    ) -> torch.Tensor:
        """Fused projection [num_tokens, (heads + 2 * kv_heads) * head_dim] -> [num_tokens, heads * head_dim]."""
        config = self.config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        norms = self._head_norms(layer)
        query = rope_cache_write(heads, *tables[layer.config.rope], *kv, inputs.slot_mapping, norms=norms)
        started = time.perf_counter()
        out = paged_attention(
            query,
            *kv,
            inputs.attention,
            scale=config.attention_scale,
            window=layer.config.window,
            soft_cap=config.attention_soft_cap,
        )
        self.attention_s += time.perf_counter() - started
        return out.view(len(qkv), -1)

    def _head_norms(self, layer: Layer) -> HeadNorms | None:
        if layer.query_norm is None or layer.key_norm is None:
            return None
        return HeadNorms(layer.query_norm, layer.key_norm, self.config.rms_norm_eps)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _normed_if(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._normed(x, weight)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._head(self._normed(hidden, self._norm))
        cap = self.config.logit_soft_cap
        return logits.float() if cap is None else (cap * torch.tanh(logits / cap)).float()
