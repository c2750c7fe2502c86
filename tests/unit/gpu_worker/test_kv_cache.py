import dataclasses

import pytest
import torch

from kernels.kv_layout.api import KVLayout, is_packed
from kernels.native.library import current, using
from services.gpu_worker.cache import kv_cache
from services.gpu_worker.cache.host_pool import PlainPool, allocate_pool, pool_bytes_per_block
from services.gpu_worker.cache.kv_cache import CODES, KVCache, check_setting, kv_bytes_per_block
from shared.errors import ConfigError


def test_a_block_is_one_run_of_the_stated_size(tiny) -> None:
    cache = KVCache.allocate(tiny.model.config, 5, 16, torch.bfloat16, "cpu")
    assert (cache.num_blocks, cache.block_size, cache.num_layers) == (5, 16, 3)
    assert cache.data[1].is_contiguous()
    assert cache.data[1].nbytes == kv_bytes_per_block(tiny.model.config, 16, torch.bfloat16)


@pytest.mark.parametrize("layout", KVLayout)
def test_layers_share_no_memory(layout: KVLayout, tiny) -> None:
    cache = KVCache.allocate(tiny.model.config, 2, 4, torch.float32, "cpu", layout)
    cache.data.zero_()
    for index in range(cache.num_layers):
        for number, tensor in enumerate(cache.layer(index)):
            assert not tensor.any()
            tensor.fill_(1 + 2 * index + number)
    assert len(cache.data.unique()) == 2 * cache.num_layers


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_read_and_written_in_the_plain_layout(dtype: torch.dtype, layout: KVLayout, tiny) -> None:
    cache = KVCache.allocate(tiny.model.config, 5, 8, dtype, "cpu", layout)
    plain = torch.randn(2, *cache.data.shape[1:], generator=torch.Generator().manual_seed(0)).to(dtype)
    cache.data.zero_()
    cache.write(2, plain)
    assert cache.read([2, 3]).equal(plain)
    assert cache.data[2:4].ne(0).sum() == plain.ne(0).sum() and not cache.data[[0, 1, 4]].any()
    assert is_packed(cache.layer(0)[0]) == (layout is KVLayout.PACKED)


@pytest.mark.skipif(current() is None, reason="no C++ kernels")
def test_int8_takes_a_byte_for_a_number_and_two_for_the_scale_of_a_vector(tiny) -> None:
    config = tiny.model.config
    cache = KVCache.allocate(config, 5, 8, torch.int8, "cpu")
    vectors = 2 * config.num_layers * config.num_kv_heads * 8
    assert cache.bytes_per_block == kv_bytes_per_block(config, 8, torch.int8) == vectors * (config.head_dim + 2)
    plain = torch.randn(2, config.num_layers, 2, config.num_kv_heads, 8, config.head_dim)
    cache.data.zero_()
    cache.write(2, plain)
    assert ((cache.read([2, 3]) - plain).abs() <= plain.abs().amax(-1, keepdim=True) / 127).all()
    assert not cache.data[[0, 1, 4]].any()
    assert isinstance(allocate_pool(cache, 3, "int8"), PlainPool), "it is as small as it gets"
    assert pool_bytes_per_block(config, 8, torch.int8, "int8") == cache.bytes_per_block


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_codes_without_c_kernels_take_the_same_memory_in_the_plain_layout(code: torch.dtype, tiny) -> None:
    config = tiny.model.config
    with using(None):
        cache = KVCache.allocate(config, 5, 8, code, "cpu")
        assert isinstance(allocate_pool(cache, 3, "int8"), PlainPool)
    assert cache.layout is KVLayout.PLAIN and not is_packed(cache.layer(0)[0])
    assert cache.bytes_per_block == kv_bytes_per_block(config, 8, code) == kv_bytes_per_block(config, 8, torch.int8)
    assert pool_bytes_per_block(config, 8, code, "int8") == cache.bytes_per_block


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_scales_on_odd_bytes_are_a_configuration_error(code: torch.dtype, tiny) -> None:
    odd = dataclasses.replace(tiny.model.config, head_dim=9)
    with pytest.raises(ConfigError, match="KV as codes needs blocks or heads of an even size, not 7 and 9"):
        KVCache.allocate(odd, 5, 7, code, "cpu")


def test_fp8_is_for_gpus_whose_compiler_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a model is loaded."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    for setting in ("auto", "int8"):
        check_setting(setting, cpu)
        check_setting(setting, gpu)
    with pytest.raises(ConfigError, match="fp8 is for GPUs"):
        check_setting("fp8", cpu)
    monkeypatch.setattr(kv_cache, "stores_fp8", lambda device: device != gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    check_setting("fp8", torch.device("cuda:1"))
    with pytest.raises(ConfigError, match="fp8: NVIDIA A100 has no float8_e4m3fn; int8 takes the same memory"):
        check_setting("fp8", gpu)


def test_the_layout_is_what_the_fastest_kernels_read(tiny) -> None:
    def layout(dtype: torch.dtype, block_size: int) -> KVLayout:
        return KVCache.allocate(tiny.model.config, 2, block_size, dtype, "cpu").layout

    assert layout(torch.float32, 7) is layout(torch.bfloat16, 8) is KVLayout.PACKED
    assert layout(torch.bfloat16, 7) is KVLayout.PLAIN, "a word would hold tokens of two blocks"
    with using(None):
        assert layout(torch.bfloat16, 8) is KVLayout.PLAIN


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (1 << 45, 16)])
def test_impossible_sizes_are_configuration_errors(num_blocks: int, block_size: int, tiny) -> None:
    with pytest.raises(ConfigError):
        KVCache.allocate(tiny.model.config, num_blocks, block_size, torch.float32, "cpu")
