import pytest
import torch

from kernels.kv_layout.api import KVLayout, is_packed
from kernels.native.library import using
from services.gpu_worker.cache.kv_cache import KVCache, kv_bytes_per_block
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
