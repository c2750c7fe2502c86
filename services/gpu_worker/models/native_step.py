"""The native decoder as one call of the C++ kernels per step, where they know its weights."""

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch

from kernels.decoder_step.native import DecoderTensors, LayerTensors, NativeDecoder, StepArrays
from kernels.linear.api import Linear
from kernels.linear.native import NativeLinear
from kernels.paged_attention.native import NativeBatch
from services.gpu_worker.models.config import DecoderConfig, RopeConfig
from services.gpu_worker.models.layers import Layer
from services.gpu_worker.models.model import ForwardInputs

Frequencies = Mapping[RopeConfig, torch.Tensor]


def native_step(
    config: DecoderConfig,
    layers: Sequence[Layer],
    embedding: torch.Tensor,
    norm: torch.Tensor,
    head: Linear,
    frequencies: Frequencies,
    num_positions: int,
) -> NativeDecoder | None:
    """The decoder for `kernels.decoder_step`, or None where it has to be computed operation by operation: on a GPU,
    without C++ kernels, with sizes that are no multiple of what a packed word holds, or in bfloat16 where no
    instruction multiplies it. `num_positions`: of the longest row."""
    is_bf16 = embedding.dtype == torch.bfloat16
    if not _is_packed(head) or (is_bf16 and not head.library.takes_bfloat16):
        return None
    rotations = {
        rope: rotation_table(inverse, num_positions, rope.attention_factor) for rope, inverse in frequencies.items()
    }
    packed = [_layer_tensors(layer, rotations) for layer in layers]
    if not all(packed):
        return None
    tensors = DecoderTensors(
        layers=[layer for layer in packed if layer is not None],
        embedding=embedding,
        final_norm=norm.float(),
        head=head,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.rms_norm_eps,
        attention_scale=config.attention_scale,
        is_bf16=is_bf16,
        # rounded as the model was trained: see DecoderModel
        embedding_scale=float(torch.tensor(config.embedding_scale, dtype=embedding.dtype)),
        attention_soft_cap=config.attention_soft_cap or 0.0,
        logit_soft_cap=config.logit_soft_cap or 0.0,
    )
    return NativeDecoder(head.library, tensors)


def step_arrays(inputs: ForwardInputs, batch: NativeBatch) -> StepArrays:
    """A step as `NativeDecoder` takes it."""
    return StepArrays(inputs.token_ids, inputs.positions, inputs.slot_mapping, batch, inputs.sample_at)


def rotation_table(frequencies: torch.Tensor, num_positions: int, factor: float) -> torch.Tensor:
    """[num_positions, rotary_dim] float32: the cosines of each pair's angle, then the sines, both times `factor`.

    Made once: an angle's cosine does not depend on the batch in which it is needed.
    """
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1).mul_(factor)


def _is_packed(linear: Linear) -> TypeGuard[NativeLinear]:
    return isinstance(linear, NativeLinear) and linear.packed.weight.in_features == linear.in_features


def _layer_tensors(layer: Layer, rotations: Mapping[RopeConfig, torch.Tensor]) -> LayerTensors | None:
    qkv, out, gated, down = layer.qkv, layer.out, layer.gated, layer.down
    if not (_is_packed(qkv) and _is_packed(out) and _is_packed(gated) and _is_packed(down)):
        return None
    return LayerTensors(
        input_norm=layer.input_norm.float(),
        qkv=qkv,
        query_norm=_wide(layer.query_norm),
        key_norm=_wide(layer.key_norm),
        out=out,
        post_attention_norm=_wide(layer.post_attention_norm),
        mlp_norm=layer.mlp_norm.float(),
        gated=gated,
        down=down,
        post_mlp_norm=_wide(layer.post_mlp_norm),
        rotation=rotations[layer.config.rope],
        window=layer.config.window,
    )


def _wide(norm: torch.Tensor | None) -> torch.Tensor | None:
    return None if norm is None else norm.float()
