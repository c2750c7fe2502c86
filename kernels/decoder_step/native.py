"""One call per step for a whole decoder of the Llama family: decoder.h says what it computes.

The residual stream is float32. Between products activations are bfloat16 where the CPU multiplies it and the cache
holds it, else float32. Keys and values lie in the cache's packed layout (kernels/paged_attention).
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.linear.native import LARGEST, NativeLinear, PackedWeight
from kernels.native.library import Float, Int, Library, Pointer
from kernels.paged_attention.native import KV_TYPES, NativeBatch, Rows

Fields = Sequence[tuple[str, Any]]


class _Projection(ctypes.Structure):
    _fields_ = (("weight", PackedWeight), ("bias", Pointer))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", Pointer),
        ("qkv", _Projection),
        ("query_norm", Pointer),
        ("key_norm", Pointer),
        ("out", _Projection),
        ("post_attention_norm", Pointer),
        ("mlp_norm", Pointer),
        ("gated", _Projection),
        ("down", _Projection),
        ("post_mlp_norm", Pointer),
        ("rotation", Pointer),
        ("rotary_dims", Int),
        ("window", Int),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, Int) for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")),
        ("head_dim", Int),
        ("embedding", Pointer),
        ("embedding_is_bf16", Int),
        ("final_norm", Pointer),
        ("head", PackedWeight),
        ("activation", Int),
        ("is_bf16", Int),
        *((name, Float) for name in ("embedding_scale", "norm_eps", "attention_scale")),
        *((name, Float) for name in ("attention_soft_cap", "logit_soft_cap")),
    )


class _Cache(ctypes.Structure):
    _fields_ = (("data", Pointer), *((name, Int) for name in ("block_bytes", "part_bytes", "block_size", "type")))


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("token_ids", "positions", "slots")),
        ("num_tokens", Int),
        ("rows", Rows),
        ("sample_at", Pointer),
        ("num_samples", Int),
        *((name, Pointer) for name in ("workspace", "logits", "largest", "attention_s")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """One block. Norm weights are float32."""

    input_norm: torch.Tensor
    qkv: NativeLinear
    out: NativeLinear
    mlp_norm: torch.Tensor
    gated: NativeLinear
    down: NativeLinear
    rotation: torch.Tensor
    """[positions, rotary_dims] float32: cosines of each pair's angle, then the sines."""
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTensors:
    """A whole decoder, as decoder.h names its parts."""

    layers: Sequence[LayerTensors]
    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: NativeLinear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float
    is_bf16: bool
    """Activations between products."""
    embedding_scale: float = 1.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A flat token batch; tensors are contiguous."""

    token_ids: torch.Tensor
    """[num_tokens] int64."""
    positions: torch.Tensor
    """[num_tokens] int64."""
    slots: torch.Tensor
    """[num_tokens] int64."""
    batch: NativeBatch
    sample_at: torch.Tensor | None
    """[num_samples] int64, ascending; None for all tokens in order."""

    @property
    def num_samples(self) -> int:
        return len(self.token_ids) if self.sample_at is None else len(self.sample_at)


class NativeDecoder:
    """The decoder in the form that the C++ step reads."""

    def __init__(self, library: Library, tensors: DecoderTensors) -> None:
        self.tensors = tensors  # keeps the memory that the structures point to
        self._layers = (_Layer * len(tensors.layers))(*map(_layer, tensors.layers))
        self._decoder = _decoder(tensors, self._layers)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._attention_s = np.zeros(1)
        self._attention_at = self._attention_s.ctypes.data
        self._last_cache: tuple[torch.Tensor, _Cache] | None = None
        self._step = library.function("pw_decoder_step", Pointer, Pointer, Pointer)
        self._workspace_bytes = library.function("pw_workspace_bytes", Pointer, Int, result=Int)

    @property
    def attention_s(self) -> float:
        """Seconds of the last step that were attention."""
        return float(self._attention_s[0])

    def logits(self, arrays: StepArrays, cache: torch.Tensor) -> torch.Tensor:
        """Run a step.

        Args:
            cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] in the packed layout, of int8 codes
                with two bytes more in the last dimension.

        Returns:
            [num_samples, vocab_size] float32.
        """
        out = torch.empty(arrays.num_samples, self.tensors.head.out_features)
        self._run(arrays, cache, logits=out.data_ptr())
        return out

    def largest(self, arrays: StepArrays, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step without storing its logits.

        Returns:
            The column of the largest logit of each sample, the first of equal ones, [num_samples] int64; and its value,
            [num_samples] float32, NaN if one was.
        """
        out = np.empty(arrays.num_samples, LARGEST)
        self._run(arrays, cache, largest=out.ctypes.data)
        return torch.from_numpy(out["column"].astype(np.int64)), torch.from_numpy(out["value"].copy())

    def _run(
        self, arrays: StepArrays, cache: torch.Tensor, *, logits: int | None = None, largest: int | None = None
    ) -> None:
        needed = self._workspace_bytes(ctypes.byref(self._decoder), len(arrays.token_ids))
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed, dtype=torch.uint8)
        step = _Step(
            arrays.token_ids.data_ptr(),
            arrays.positions.data_ptr(),
            arrays.slots.data_ptr(),
            len(arrays.token_ids),
            arrays.batch.rows,
            None if arrays.sample_at is None else arrays.sample_at.data_ptr(),
            arrays.num_samples,
            self._workspace.data_ptr(),
            logits,
            largest,
            self._attention_at,
        )
        self._attention_s[0] = 0.0
        self._step(ctypes.byref(self._decoder), ctypes.byref(self._cache_of(cache)), ctypes.byref(step))

    def _cache_of(self, data: torch.Tensor) -> _Cache:
        """Of the tensor that came last, which is nearly always the same, the structure is kept."""
        if self._last_cache is None or self._last_cache[0] is not data:
            self._last_cache = (data, _cache(data))
        return self._last_cache[1]


def _cache(data: torch.Tensor) -> _Cache:
    num_bytes = data.itemsize
    return _Cache(
        data.data_ptr(),
        data.stride(0) * num_bytes,
        data.stride(2) * num_bytes,
        data.shape[4],
        KV_TYPES[data.dtype],
    )


def _projection(linear: NativeLinear) -> _Projection:
    return _Projection(linear.packed.weight, _pointer(linear.bias))


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer(tensors: LayerTensors) -> _Layer:
    return _Layer(
        input_norm=tensors.input_norm.data_ptr(),
        qkv=_projection(tensors.qkv),
        query_norm=_pointer(tensors.query_norm),
        key_norm=_pointer(tensors.key_norm),
        out=_projection(tensors.out),
        post_attention_norm=_pointer(tensors.post_attention_norm),
        mlp_norm=tensors.mlp_norm.data_ptr(),
        gated=_projection(tensors.gated),
        down=_projection(tensors.down),
        post_mlp_norm=_pointer(tensors.post_mlp_norm),
        rotation=tensors.rotation.data_ptr(),
        rotary_dims=tensors.rotation.shape[1],
        window=tensors.window or 0,
    )


def _decoder(tensors: DecoderTensors, layers: "ctypes.Array[_Layer]") -> _Decoder:
    return _Decoder(
        layers=layers,
        num_layers=len(tensors.layers),
        hidden_size=tensors.embedding.shape[1],
        intermediate_size=tensors.layers[0].down.in_features,
        num_heads=tensors.num_heads,
        num_kv_heads=tensors.num_kv_heads,
        head_dim=tensors.head_dim,
        embedding=tensors.embedding.data_ptr(),
        embedding_is_bf16=tensors.embedding.dtype == torch.bfloat16,
        final_norm=tensors.final_norm.data_ptr(),
        head=tensors.head.packed.weight,
        activation=tensors.layers[0].gated.activation,
        is_bf16=tensors.is_bf16,
        embedding_scale=tensors.embedding_scale,
        norm_eps=tensors.norm_eps,
        attention_scale=tensors.attention_scale,
        attention_soft_cap=tensors.attention_soft_cap,
        logit_soft_cap=tensors.logit_soft_cap,
    )
