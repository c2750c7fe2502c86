import numpy as np
import pytest
import torch

from kernels.kv_layout.api import KVLayout
from services.gpu_worker.cache.host_pool import Int8Pool, PlainPool, allocate_pool, pool_bytes_per_block
from services.gpu_worker.cache.kv_cache import KVCache
from shared.errors import ConfigError


def filled_cache(tiny, dtype: torch.dtype = torch.float32, layout: KVLayout = KVLayout.PLAIN) -> KVCache:
    cache = KVCache.allocate(tiny.model.config, 60, 8, dtype, "cpu", layout)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
    return cache


TOGETHER = np.column_stack((np.arange(5, 45), np.arange(40)))
SCATTERED = np.column_stack((np.random.default_rng(0).permutation(60)[:40], np.random.default_rng(1).permutation(40)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [TOGETHER, SCATTERED], ids=["together", "scattered"])
def test_a_plain_pool_gives_back_what_it_was_given(pairs: np.ndarray, dtype: torch.dtype, tiny) -> None:
    cache = filled_cache(tiny, dtype)
    before = cache.data.clone()
    pool = allocate_pool(cache, 40)
    pool.store(cache, pairs)
    cache.data[pairs[:, 0]] = float("nan")
    pool.load(cache, pairs[:, ::-1].copy())
    assert cache.data.equal(before)


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [TOGETHER, SCATTERED], ids=["together", "scattered"])
def test_an_int8_pool_gives_back_what_it_was_given_within_half_a_scale(
    pairs: np.ndarray, dtype: torch.dtype, layout: KVLayout, tiny
) -> None:
    """A scale belongs to one token of one head, in any layout. 40 neighbours go in pieces; blocks that were not named
    stay as they are."""
    cache = filled_cache(tiny, dtype, layout)
    before, plain = cache.data.clone(), cache.read(slice(60)).clone().float()
    pool = allocate_pool(cache, 40, "int8")
    pool.store(cache, pairs)
    assert cache.data.equal(before)
    cache.data[pairs[:, 0]] = float("nan")
    pool.load(cache, pairs[:, ::-1].copy())
    rounding = 0 if dtype == torch.float32 else 2.0**-8 * plain.abs()
    allowed = 0.501 * plain.abs().amax(-1, keepdim=True) / 127 + 4e-6 + rounding
    assert bool(((cache.read(slice(60)).float() - plain).abs() <= allowed).all())
    others = np.setdiff1d(np.arange(60), pairs[:, 0])
    assert cache.data[others].equal(before[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_block_are_those_allocated(dtype: torch.dtype, tiny) -> None:
    cache = filled_cache(tiny, dtype)
    plain, packed = allocate_pool(cache, 3), allocate_pool(cache, 3, "int8")
    assert isinstance(plain, PlainPool) and isinstance(packed, Int8Pool)
    assert plain.data.nbytes == 3 * cache.bytes_per_block
    assert plain.data.nbytes == 3 * pool_bytes_per_block(tiny.model.config, 8, dtype, "auto")
    stored = packed.codes.nbytes + packed.scales.nbytes
    assert stored == 3 * pool_bytes_per_block(tiny.model.config, 8, dtype, "int8")
    assert plain.num_blocks == packed.num_blocks == 3


def test_no_pool_and_an_impossible_one(tiny) -> None:
    cache = filled_cache(tiny)
    assert allocate_pool(cache, 0).num_blocks == 0
    for dtype in ("auto", "int8"):
        with pytest.raises(ConfigError, match="no room"):
            allocate_pool(cache, 1 << 45, dtype)
