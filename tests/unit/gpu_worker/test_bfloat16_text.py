"""A model in bfloat16: its text does not depend on how the work is cut and shared, at any dispatch level."""

import random

import pytest
import torch

from kernels.native.library import built_levels, using
from services.gpu_worker.cache.kv_cache import KVCache, cache_dtype
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import Model
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_llama import VOCAB_SIZE

BLOCK_SIZE = 8
LENGTHS = (1, 2, 8, 31, 63, 64, 100, 111, 255, 256, 257, 300)
"""Around the ends of blocks, of tiles and of splits."""
NUM_TOKENS = 12


@pytest.fixture(scope="module", params=[level.name for level in built_levels()])
def model(request: pytest.FixtureRequest, tiny):
    with using(request.param):
        yield load_model(tiny.folder, dtype="bfloat16", device="cpu")


def prompt_of(size: int) -> list[int]:
    draw = random.Random(size)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(size)]


def texts(
    model: Model, prompts: list[list[int]], *, chunk_size: int = 512, num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    """Greedy continuations, all in one batch."""
    dtype = cache_dtype(model.stored_dtype, model.dtype, model.config, BLOCK_SIZE, model.device)
    assert dtype == torch.bfloat16
    cache = KVCache.allocate(model.config, 400, BLOCK_SIZE, dtype, model.device)
    cache.data.fill_(float("nan"))
    driver = EngineDriver(Engine(model, cache, EngineConfig(len(prompts), 512)))
    params = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt, params)
    outputs = driver.run(chunk_size=chunk_size)
    return [outputs[str(number)] for number in range(len(prompts))]


def test_alone_in_a_batch_in_chunks_and_after_a_recompute(model: Model) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    alone = [texts(model, [prompt])[0] for prompt in prompts]
    assert texts(model, prompts) == alone
    for chunk_size in (7, 64):
        assert texts(model, prompts, chunk_size=chunk_size) == alone
    again = [prompt + text[:5] for prompt, text in zip(prompts, alone, strict=True)]
    assert texts(model, again, num_tokens=NUM_TOKENS - 5) == [text[5:] for text in alone]
    assert len({tuple(text) for text in alone}) == len(alone), "prompts must lead to different texts"


def test_what_the_cache_of_a_model_holds(model: Model) -> None:
    cpu, f32, bf16, f16 = torch.device("cpu"), torch.float32, torch.bfloat16, torch.float16

    def chosen(stored: torch.dtype, computed: torch.dtype, block_size: int = 16) -> torch.dtype:
        return cache_dtype(stored, computed, model.config, block_size, cpu)

    assert chosen(bf16, f32) == chosen(bf16, bf16) == bf16
    assert chosen(f32, f32) == chosen(f16, f32) == f32
    assert chosen(bf16, f32, block_size=7) == f32, "a word of the packed layout would hold tokens of two blocks"
    with using(None):
        assert chosen(bf16, f32) == f32, "torch reads what it computes in"
