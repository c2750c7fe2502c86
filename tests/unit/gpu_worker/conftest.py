"""A tiny model in float32 and engines on it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from kernels.kv_layout.api import KVLayout
from services.gpu_worker.cache.host_pool import PlainPool, allocate_pool
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import Model
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_llama import generate, write_tiny_llama


@dataclass(frozen=True)
class Tiny:
    """One model twice: as the worker runs it and as Transformers does."""

    folder: Path
    model: Model
    peer: LlamaForCausalLM

    def expected(self, prompt: list[int], num_tokens: int) -> list[int]:
        return generate(self.peer, prompt, num_tokens)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny-llama")
    peer = write_tiny_llama(folder)
    return Tiny(folder, load_model(folder, dtype="float32", device="cpu"), peer)


MakeDriver = Callable[..., EngineDriver]


@pytest.fixture
def make_driver(tiny: Tiny) -> MakeDriver:
    """Engines over a cache and a host pool that are NaN throughout at first."""

    def make(
        *,
        block_size: int = 8,
        num_blocks: int = 200,
        max_num_seqs: int = 8,
        seed: int = 0,
        num_cpu_blocks: int = 0,
        cpu_cache_dtype: str = "auto",
        layout: KVLayout | None = None,
        max_model_len: int = 512,
    ) -> EngineDriver:
        model = tiny.model
        cache = KVCache.allocate(model.config, num_blocks, block_size, model.dtype, model.device, layout)
        cache.data.fill_(float("nan"))
        pool = allocate_pool(cache, num_cpu_blocks, cpu_cache_dtype)
        if isinstance(pool, PlainPool):
            pool.data.fill_(float("nan"))
        return EngineDriver(Engine(model, cache, EngineConfig(max_num_seqs, max_model_len), pool=pool), seed=seed)

    return make


@pytest.fixture(autouse=True)
def _one_thread():
    """The tensors are tiny: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
