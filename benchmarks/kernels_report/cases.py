"""The launches that the report compiles: every kernel at its default tiles, over what changes its code."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.block_copy import triton as block_copy
from kernels.cache_write import triton as cache_write
from kernels.cache_write.api import HeadNorms
from kernels.gated import triton as gated
from kernels.kv_layout.api import split_plain, vector_width
from kernels.launch import Launch
from kernels.paged_attention import triton as attention
from kernels.paged_attention.gpu_batch import GpuBatch
from kernels.paged_attention.triton_kernels import combine_kernel
from kernels.rms_norm import triton as rms_norm
from kernels.sampling import triton as sampling

HEAD_DIMS = (64, 80, 96, 128, 256)
_KV_HEADS, _BLOCK_SIZE, _NUM_BLOCKS, _ROWS, _CHUNK, _VOCAB = 8, 16, 1024, 64, 512, 128256


@dataclass(frozen=True, slots=True)
class Case:
    """A launch and how the report names it."""

    name: str
    launch: Launch


def all_cases() -> Iterator[Case]:
    """In the order of the report. Tensors have shapes but no memory."""
    for head_dim in HEAD_DIMS:
        yield from _attention(f"d{head_dim} bf16", head_dim, torch.bfloat16)
    yield from _attention("d128 fp16", 128, torch.float16)
    for head_dim in (64, 128, 256):
        yield from _attention(f"d{head_dim} fp32", head_dim, torch.float32)
    yield from _attention("d128 bf16 mha", 128, torch.bfloat16, group=1)
    yield from _attention("d128 bf16 mqa", 128, torch.bfloat16, group=32)
    yield from _attention("d256 bf16 window cap", 256, torch.bfloat16, window=4096, soft_cap=50.0)
    for block_size in (8, 128):
        yield from _attention(f"d128 bf16 blocks of {block_size}", 128, torch.bfloat16, block_size=block_size)
    for code in (torch.int8, torch.float8_e4m3fn):
        for block_size in (8, 128):
            name = f"d128 bf16 blocks of {block_size} kv {_name(code)}"
            yield from _attention(name, 128, torch.bfloat16, code, block_size=block_size)
        for head_dim in HEAD_DIMS:
            yield from _attention(f"d{head_dim} bf16 kv {_name(code)}", head_dim, torch.bfloat16, code)
        yield from _attention(f"d128 fp16 kv {_name(code)}", 128, torch.float16, code)
        for head_dim in (64, 128, 256):
            yield from _attention(f"d{head_dim} fp32 kv {_name(code)}", head_dim, torch.float32, code)
        for group, kind in ((1, "mha"), (32, "mqa")):
            yield from _attention(f"d128 bf16 {kind} kv {_name(code)}", 128, torch.bfloat16, code, group=group)
        name = f"d256 bf16 window cap kv {_name(code)}"
        yield from _attention(name, 256, torch.bfloat16, code, window=4096, soft_cap=50.0)
    for kv_code in (None, torch.int8, torch.float8_e4m3fn):
        kv = "" if kv_code is None else f" kv {_name(kv_code)}"
        yield Case(f"cache_write d128 bf16{kv}", _cache_write(128, torch.bfloat16, kv_code))
        yield Case(f"cache_write d80 fp32{kv}", _cache_write(80, torch.float32, kv_code))
        yield Case(f"cache_write d128 bf16 head norms{kv}", _cache_write(128, torch.bfloat16, kv_code, normed=True))
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = _empty(_ROWS, 4096, dtype=dtype), _empty(4096, dtype=dtype)
        yield Case(f"rms_norm 4096 {_name(dtype)}", rms_norm.launch(x, x, weight, 1e-5))
        gate_up = _empty(_ROWS, 28672, dtype=dtype)
        yield Case(f"silu_mul 14336 {_name(dtype)}", gated.launch(gate_up[:, :14336], gate_up))
        yield Case(f"gelu_mul 14336 {_name(dtype)}", gated.launch(gate_up[:, :14336], gate_up, is_gelu=True))
    blocks = _empty(_NUM_BLOCKS, 32, 2, _KV_HEADS, _BLOCK_SIZE, 128, dtype=torch.bfloat16)
    yield Case("block_copy", block_copy.launch(blocks, blocks, _empty(_ROWS, 2, dtype=torch.int64)))
    yield Case(f"sample {_VOCAB}", _sample(_VOCAB))


def _attention(
    name: str,
    head_dim: int,
    dtype: torch.dtype,
    code: torch.dtype | None = None,
    *,
    group: int = 4,
    window: int | None = None,
    soft_cap: float | None = None,
    block_size: int = _BLOCK_SIZE,
) -> Iterator[Case]:
    query = _empty(_ROWS + _CHUNK, group * _KV_HEADS, head_dim, dtype=dtype)
    cache, scales = split_plain(_cache(head_dim, code or dtype, block_size))
    layer = attention.Layer(cache, cache, scales, scales, 0.1, window, soft_cap)
    rows = _empty(_ROWS + 1, dtype=torch.int32)
    tables = _empty(_ROWS + 1, 512, dtype=torch.int32)
    batch = GpuBatch(len(query), rows, rows, rows, rows[:-1], rows[-1:], tables, 8192, _CHUNK)
    for launch in attention.launches(query, query, layer, batch):
        if code is not None and launch.kernel is combine_kernel:
            continue  # it knows nothing of codes
        yield Case(f"{launch.kernel.__name__.removesuffix('_kernel')} {name}", launch)


def _cache_write(head_dim: int, dtype: torch.dtype, code: torch.dtype | None, *, normed: bool = False) -> Launch:
    qkv = _empty(_CHUNK, 6 * _KV_HEADS, head_dim, dtype=dtype)
    query, key, value = qkv[:, : 4 * _KV_HEADS], qkv[:, -2 * _KV_HEADS : -_KV_HEADS], qkv[:, -_KV_HEADS:]
    cache = _cache(head_dim, code or dtype, _BLOCK_SIZE)
    ids, table = _empty(_CHUNK, dtype=torch.int64), _empty(_CHUNK, head_dim, dtype=dtype)
    weight = _empty(head_dim, dtype=torch.float32)
    slots = cache_write.slots(cache, cache, ids)
    norms = HeadNorms(weight, weight, 1e-6) if normed else None
    return cache_write.launch(query, query, key, value, slots, cache_write.Rotation(table, table), norms)


def _cache(head_dim: int, dtype: torch.dtype, block_size: int) -> torch.Tensor:
    """One layer's keys or values as the worker allocates them (services/gpu_worker/cache): 32 layers, K and V."""
    width = vector_width(dtype, head_dim)
    return _empty(_NUM_BLOCKS, 32, 2, _KV_HEADS, block_size, width, dtype=dtype)[:, 0, 0]


def _sample(vocab_size: int) -> Launch:
    column = _empty(_ROWS, dtype=torch.float32)
    logits, times = _empty(_ROWS, vocab_size, dtype=torch.float32), _empty(_ROWS, 3, 64, dtype=torch.float64)
    ids = _empty(_ROWS, dtype=torch.int64)
    return sampling.launch(ids, logits, column, ids, column, column, times)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
