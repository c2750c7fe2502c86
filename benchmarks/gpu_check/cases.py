"""One check per kernel: what it computes, what it should, and what it moves or multiplies."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kernels.block_copy import triton as block_copy
from kernels.cache_write import triton as cache_write
from kernels.gated import reference as gated_reference
from kernels.gated import triton as gated
from kernels.kv_layout.api import read_plain, split_plain, vector_width, write_plain
from kernels.launch import stores_fp8
from kernels.paged_attention import reference as attention_reference
from kernels.paged_attention import triton as attention
from kernels.paged_attention.gpu_batch import prepare
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rms_norm import triton as rms_norm
from kernels.rope.api import rope, rope_tables

_BLOCK_SIZE = 16
_ODD = [1, 63, 100, 111, 513, 1025, 2000]


@dataclass(frozen=True, slots=True)
class Check:
    """A kernel at one size."""

    name: str
    work: Callable[[], torch.Tensor]
    """What is timed; gives a tensor or fills one."""
    expected: torch.Tensor
    """By the torch reference, in float32."""
    tolerance: float
    """Of the relative error (Frobenius norm)."""
    num_bytes: int
    """Read and written at least once."""
    flops: int = 0
    """Of matrix products; 0 for a kernel that memory bounds."""
    read: Callable[[torch.Tensor], torch.Tensor] = lambda result: result
    """From what `work` gives to what is compared."""


def all_checks() -> Iterator[Check]:
    """Sizes of an 8B model (32 query heads, 8 KV heads), and the odd ones."""
    for head_dim in (64, 80, 96, 128, 256):
        yield _attention(f"decode d{head_dim} bf16 64 x 2,000", [1] * 64, [2000] * 64, head_dim, torch.bfloat16)
    yield _attention("decode d128 fp16 1 x 8,000", [1], [8000], 128, torch.float16)
    yield _attention("decode d128 fp32 7 x odd", [1] * 7, _ODD, 128, torch.float32)
    yield _attention("decode d128 mha", [1] * 16, [2000] * 16, 128, torch.bfloat16, heads=(32, 32))
    yield _attention("decode d128 mqa", [1] * 64, [2000] * 64, 128, torch.bfloat16, heads=(32, 1))
    yield _attention("decode window cap", [1] * 64, [2000] * 64, 256, torch.bfloat16, window=1000, soft_cap=50.0)
    codes = [torch.int8, *([torch.float8_e4m3fn] if stores_fp8(torch.device("cuda")) else [])]
    for code in codes:
        yield from _over_codes(code)
    for head_dim in (64, 128, 256):
        yield _attention(f"prefill d{head_dim} bf16 4,096", [4096], [4096], head_dim, torch.bfloat16)
    yield _attention("prefill chunks of 500 in 3,000", [500] * 4, [3000] * 4, 128, torch.bfloat16)
    yield _attention("prefill fp32 odd", [63, 100, 111], [63, 700, 1111], 80, torch.float32)
    yield from (_cache_write(code) for code in (None, *codes))
    yield _rms_norm()
    yield _silu_mul()
    yield from (_block_copy(code) for code in (None, *codes))


def _over_codes(code: torch.dtype) -> Iterator[Check]:
    """What a cache of codes changes: decode at every head size, and the other paths once."""
    kv, bf16 = f"kv {_name(code)}", torch.bfloat16
    for head_dim in (64, 80, 96, 128, 256):
        yield _attention(f"decode d{head_dim} {kv} 64 x 2,000", [1] * 64, [2000] * 64, head_dim, bf16, code=code)
    yield _attention(f"decode d128 fp16 {kv} 7 x odd", [1] * 7, _ODD, 128, torch.float16, code=code)
    yield _attention(f"decode d128 fp32 {kv} 7 x odd", [1] * 7, _ODD, 128, torch.float32, code=code)
    yield _attention(f"decode d128 mha {kv}", [1] * 16, [2000] * 16, 128, bf16, heads=(32, 32), code=code)
    yield _attention(f"decode window cap {kv}", [1] * 64, [2000] * 64, 256, bf16, window=1000, soft_cap=50.0, code=code)
    yield _attention(f"prefill d128 {kv} 4,096", [4096], [4096], 128, bf16, code=code)
    yield _attention(f"prefill fp32 {kv} odd", [63, 100, 111], [63, 700, 1111], 80, torch.float32, code=code)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}[dtype]


def _attention(
    name: str,
    query_lens: list[int],
    context_lens: list[int],
    head_dim: int,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (32, 8),
    window: int | None = None,
    soft_cap: float | None = None,
    code: torch.dtype | None = None,
) -> Check:
    lengths, contexts = np.array(query_lens), np.array(context_lens)
    needed = -(-contexts // _BLOCK_SIZE)
    total, widest = int(needed.sum()), int(needed.max())
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(lengths), widest, dtype=torch.int32)
    for row, (end, count) in enumerate(zip(np.cumsum(needed).tolist(), needed.tolist(), strict=True)):
        tables[row, :count] = order[end - count : end]
    tables = tables.cuda()
    query = _random(int(lengths.sum()), heads[0], head_dim, dtype=dtype)
    shape = (total, heads[1], _BLOCK_SIZE, head_dim)
    k_cache, v_cache = (_cache(_random(*shape, dtype=dtype, seed=seed), code) for seed in (1, 2))
    (keys, k_scales), (values, v_scales) = split_plain(k_cache), split_plain(v_cache)
    layer = attention.Layer(keys, values, k_scales, v_scales, head_dim**-0.5, window, soft_cap)
    batch = prepare(lengths, contexts, tables)
    wide_k, wide_v = (read_plain(cache).float() for cache in (k_cache, v_cache))
    index = attention_reference.prepare(lengths, contexts, tables, wide_k)
    expected = attention_reference.paged_attention(query.float(), wide_k, wide_v, index, layer.scale, window, soft_cap)
    seen = contexts if window is None else np.minimum(contexts, window + lengths - 1)
    read = int(seen.sum()) * heads[1] * k_cache.shape[3] * 2 * k_cache.element_size()
    pairs = int((lengths * (2 * seen - lengths + 1) // 2).sum())
    flops = 4 * pairs * heads[0] * head_dim if lengths.max() > 1 else 0
    return Check(
        name,
        lambda: attention.paged_attention(query, layer, batch),
        expected,
        _tolerance(dtype),
        read + 2 * query.nbytes,
        flops,
    )


def _cache_write(code: torch.dtype | None) -> Check:
    num_tokens, num_heads, num_kv_heads, head_dim = 4096, 32, 8, 128
    fused = _random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=torch.bfloat16)
    query, key, value = fused[:, :num_heads], fused[:, num_heads:-num_kv_heads], fused[:, -num_kv_heads:]
    frequencies = 10000.0 ** -(torch.arange(head_dim // 2, device="cuda") / (head_dim // 2))
    positions = torch.arange(num_tokens, device="cuda")
    tables = rope_tables(positions, frequencies, torch.float32)
    rotation = cache_write.Rotation(*tables)
    shape = (num_tokens // _BLOCK_SIZE, num_kv_heads, _BLOCK_SIZE, head_dim)
    k_cache, v_cache = (_cache(torch.zeros(shape, dtype=torch.bfloat16, device="cuda"), code) for _ in range(2))
    slots = cache_write.slots(k_cache, v_cache, positions.flip(0).contiguous())

    def read(out: torch.Tensor) -> torch.Tensor:
        stored = [read_plain(cache, torch.bfloat16) for cache in (k_cache, v_cache)]
        flat = [kv.transpose(1, 2).reshape(num_tokens, num_kv_heads, head_dim)[slots.mapping] for kv in stored]
        return torch.cat((out, *flat), 1)

    expected = torch.cat((rope(query.float(), *tables), rope(key.float(), *tables), value.float()), 1)
    written = query.nbytes + 2 * k_cache.nbytes
    return Check(
        f"cache_write 4,096 x 48 x 128 {code or ''}",
        lambda: cache_write.cache_write(query, key, value, slots, rotation),
        expected,
        1e-2 if code is None else 5e-2,
        fused.nbytes + written,
        read=read,
    )


def _rms_norm() -> Check:
    x, weight = _random(4096, 4096, dtype=torch.bfloat16), _random(4096, dtype=torch.bfloat16, seed=1)
    expected = rms_norm_reference.rms_norm(x.float(), weight.float(), 1e-5)
    return Check("rms_norm 4,096", lambda: rms_norm.rms_norm(x, weight, 1e-5), expected, 1e-2, 2 * x.nbytes)


def _silu_mul() -> Check:
    gate_up = _random(4096, 28672, dtype=torch.bfloat16)
    expected = gated_reference.silu_mul(gate_up.float())
    moved = gate_up.nbytes * 3 // 2
    return Check("silu_mul 14,336", lambda: gated.gated(gate_up, is_gelu=False), expected, 1e-2, moved)


def _cache(plain: torch.Tensor, code: torch.dtype | None) -> torch.Tensor:
    """In the plain layout of kernels/kv_layout: the numbers themselves, or codes and scales."""
    if code is None:
        return plain
    width = vector_width(code, plain.shape[-1])
    cache = torch.zeros(*plain.shape[:-1], width, dtype=torch.int8, device=plain.device).view(code)
    write_plain(plain, cache)
    return cache


def _block_copy(code: torch.dtype | None) -> Check:
    """Host and device in turn: blocks go out to pinned memory and come back elsewhere, codes with their scales."""
    cache = _cache(_random(512, 32, 2, 8, _BLOCK_SIZE, 64, dtype=torch.bfloat16), code)
    host = torch.empty(cache.shape, dtype=cache.dtype, pin_memory=True)
    target = torch.zeros(cache.shape, dtype=cache.dtype, device=cache.device)
    order = np.random.default_rng(0).permutation(512)
    pairs = np.stack((np.arange(512), order), 1)

    def run() -> torch.Tensor:
        block_copy.copy_pairs(cache, host, pairs)
        block_copy.copy_pairs(host, target, pairs[:, ::-1].copy())
        return target

    name = f"block_copy out and back {_name(cache.dtype)}"
    return Check(name, run, read_plain(cache).float(), 0.0, 4 * cache.nbytes, read=read_plain)
