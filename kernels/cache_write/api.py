"""Public entries of the cache write. The layout of the cache is described in kernels/paged_attention/api.py."""

from dataclasses import dataclass

import torch

from kernels.cache_write import native, reference
from kernels.checks import library_of_packed, require, same_place
from kernels.kv_layout.api import holds_codes, is_packed, meets, run_shape, split_plain
from kernels.launch import runs_triton
from kernels.rms_norm.api import rms_norm
from kernels.rope.api import rope


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each head before it turns."""

    query: torch.Tensor
    """[head_dim], as `rms_norm` takes it."""
    key: torch.Tensor
    eps: float


def cache_write(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store the keys and values of a step.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim].
        k_cache, v_cache: one layer, plain or packed (kernels/kv_layout); written in place. Packed ones in bfloat16 also
            take float32, and round it; those of codes take any dtype.
        slot_mapping: [num_tokens] int64, `block_id * block_size + offset`; no slot twice. The caller vouches for the
            range: checking it would read the tensor back from the device.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    shapes = f"key {tuple(key.shape)}, value {tuple(value.shape)}, {tuple(slot_mapping.shape)} slots"
    require(key.dim() == 3 and key.shape == value.shape, f"cache_write: {shapes}")
    num_kv_heads, _, head_dim = run_shape(k_cache)
    require(k_cache.numel() == v_cache.numel(), f"cache_write: cache {tuple(k_cache.shape)} {tuple(v_cache.shape)}")
    require(key.shape[1:] == (num_kv_heads, head_dim), f"cache_write: {shapes}, cache {tuple(k_cache.shape)}")
    require(slot_mapping.shape == key.shape[:1], f"cache_write: {shapes}")
    require(slot_mapping.dtype == torch.int64, "cache_write: slot_mapping must be int64")
    require(same_place(key, value) and same_place(k_cache, v_cache), "cache_write: tensors differ in dtype or device")
    if not is_packed(k_cache):
        alike = same_place(key, k_cache) or (holds_codes(k_cache.dtype) and key.device == k_cache.device)
        require(alike, "cache_write: tensors differ in dtype or device")
        _write_plain(key, value, k_cache, v_cache, slot_mapping)
        return
    require(meets(key.dtype, k_cache.dtype), f"cache_write: {key.dtype} to {k_cache.dtype}")
    library = library_of_packed("cache_write")
    native.rope_cache_write(library, None, key, value, k_cache, v_cache, slot_mapping)


def rope_cache_write(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, after a norm of each head if the model has one, and store keys and values.

    Args:
        heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys and values side by side.
        cos, sin: from `kernels.rope.api.rope_tables`.
        k_cache, v_cache, slot_mapping: as in `cache_write`.
        norms: weights [head_dim] and the addend of the mean square.

    Returns:
        The queries, [num_tokens, num_heads, head_dim].

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    num_kv_heads = run_shape(k_cache)[0]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    shapes = f"heads {tuple(heads.shape)}, tables {tuple(cos.shape)}, {tuple(sin.shape)}"
    require(heads.dim() == 3 and num_heads > 0, f"rope_cache_write: {shapes}, {num_kv_heads} KV heads")
    fits = cos.dim() == 2 and cos.shape == sin.shape and len(cos) == len(heads) and cos.shape[1] <= heads.shape[2]
    require(fits and cos.is_contiguous() and sin.is_contiguous(), f"rope_cache_write: {shapes}")
    require(slot_mapping.shape == heads.shape[:1], f"rope_cache_write: {tuple(slot_mapping.shape)} slots")
    query, key, value = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    if runs_triton(heads):
        from kernels.cache_write import triton

        slots = triton.slots(k_cache, v_cache, slot_mapping)
        return triton.cache_write(query, key, value, slots, triton.Rotation(cos, sin), norms)
    turning = heads[:, :-num_kv_heads]
    if norms is not None:
        parts = ((query, norms.query), (key, norms.key))
        turning = torch.cat([_normed(part, weight, norms.eps) for part, weight in parts], dim=1)
    rotated = rope(turning, cos, sin)
    cache_write(rotated[:, num_heads:], value, k_cache, v_cache, slot_mapping)
    return rotated[:, :num_heads]


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of each head."""
    return rms_norm(x.reshape(-1, x.shape[2]), weight, eps).view(x.shape)


def _write_plain(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    if not runs_triton(key):
        reference.cache_write(key, value, split_plain(k_cache), split_plain(v_cache), slot_mapping)
        return
    from kernels.cache_write import triton

    triton.cache_write(key[:, :0], key, value, triton.slots(k_cache, v_cache, slot_mapping))
