import pytest
import torch

from services.gpu_worker.cache.kv_cache import KVCache, kv_bytes_per_block, num_blocks_for
from shared.errors import ConfigError


def test_a_block_is_one_run_of_the_stated_size(tiny) -> None:
    cache = KVCache.allocate(tiny.model.config, 5, 16, torch.bfloat16, "cpu")
    assert (cache.num_blocks, cache.block_size, cache.num_layers) == (5, 16, 3)
    assert cache.data[1].is_contiguous()
    assert cache.data[1].nbytes == kv_bytes_per_block(tiny.model.config, 16, torch.bfloat16)


def test_layers_share_no_memory(tiny) -> None:
    cache = KVCache.allocate(tiny.model.config, 2, 4, torch.float32, "cpu")
    cache.data.zero_()
    for index in range(cache.num_layers):
        for number, tensor in enumerate(cache.layer(index)):
            assert not tensor.any()
            tensor.fill_(1 + 2 * index + number)
    assert len(cache.data.unique()) == 2 * cache.num_layers


def test_number_of_blocks_for_a_budget(tiny) -> None:
    size = kv_bytes_per_block(tiny.model.config, 16, torch.float32)
    budgets = (size * 7 + size - 1, size, size - 1, -5)
    assert [num_blocks_for(budget, tiny.model.config, 16, torch.float32) for budget in budgets] == [7, 1, 0, 0]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (1 << 45, 16)])
def test_impossible_sizes_are_configuration_errors(num_blocks: int, block_size: int, tiny) -> None:
    with pytest.raises(ConfigError):
        KVCache.allocate(tiny.model.config, num_blocks, block_size, torch.float32, "cpu")
