"""A KV cache of int8 codes: near the exact one, and the same text however its work is cut or its blocks are moved."""

import random
from typing import cast

import pytest
import torch

from kernels.native.library import built_levels, using
from services.gpu_worker.cache.host_pool import allocate_pool
from services.gpu_worker.cache.kv_cache import KVCache, cache_dtype
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.decoder import DecoderModel
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import ForwardInputs
from services.gpu_worker.service.loading import fingerprint
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_llama import VOCAB_SIZE

LENGTHS = (1, 7, 8, 31, 64, 100)


@pytest.fixture(scope="module", params=[level.name for level in built_levels()])
def model(request: pytest.FixtureRequest, tiny):
    with using(request.param):
        yield cast(DecoderModel, load_model(tiny.folder, dtype="float32", device="cpu"))


def prompt_of(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


def int8_cache(model: DecoderModel, num_blocks: int = 200) -> KVCache:
    dtype = cache_dtype(model.stored_dtype, model.dtype, model.config, 8, model.device, "int8")
    cache = KVCache.allocate(model.config, num_blocks, 8, dtype, model.device)
    assert cache.data.dtype == torch.int8
    return cache


def texts(model: DecoderModel, lengths: tuple[int, ...], chunk_size: int = 512) -> list[list[int]]:
    cache = int8_cache(model)
    cache.data.fill_(-1)  # scales that are not a number: nothing reads what nobody wrote
    driver = EngineDriver(Engine(model, cache, EngineConfig(len(lengths), 512)))
    for length in lengths:
        params = SamplingParams(max_tokens=10, seed=0, temperature=0.0, ignore_eos=True)
        driver.add(str(length), prompt_of(length), params)
    outputs = driver.run(chunk_size=chunk_size)
    return [outputs[str(length)] for length in lengths]


def test_the_same_text_alone_in_a_batch_and_in_chunks(model: DecoderModel) -> None:
    alone = [texts(model, (length,))[0] for length in LENGTHS]
    assert texts(model, LENGTHS) == alone
    assert texts(model, LENGTHS, chunk_size=7) == alone


def test_one_call_and_operations_read_the_same_codes(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are near those of an exact cache; random weights are the worst case."""
    steps: list[tuple[ForwardInputs, torch.Tensor]] = []
    forward = model.forward

    def record(inputs: ForwardInputs, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        steps.append((inputs, forward(inputs, cache)))
        return steps[-1][1].argmax(-1), steps[-1][1].amax(-1)

    monkeypatch.setattr(model, "forward_largest", record)
    assert model.is_native
    texts(model, (64,))
    inputs, logits = steps[0]
    exact = KVCache.allocate(model.config, 20, 8, model.dtype, model.device)
    expected = model.forward_by_operations(inputs, exact)
    torch.testing.assert_close(model.forward_by_operations(inputs, int8_cache(model)), logits, rtol=1e-4, atol=1e-4)
    error = (logits - expected).norm() / expected.norm()
    assert 0.0001 < error < 0.05


def test_blocks_are_copied_to_the_host_and_back_as_they_are(model: DecoderModel) -> None:
    import numpy as np

    cache = int8_cache(model, 6)
    cache.data.copy_(torch.randint(-128, 128, cache.data.shape, dtype=torch.int8))
    before = cache.data.clone()
    pool = allocate_pool(cache, 4, "int8")
    pool.store(cache, np.array([[1, 3], [4, 0]]))
    cache.data.zero_()
    pool.load(cache, np.array([[3, 1], [0, 4]]))
    assert cache.data[[1, 4]].equal(before[[1, 4]])


def test_the_fingerprint_says_what_the_cache_holds(model: DecoderModel) -> None:
    assert "-kv:int8-" in fingerprint(model, int8_cache(model).data.dtype)
