"""A model whose weights are rounded to int8: near the exact one, and the same text however its work is cut."""

import random
from pathlib import Path
from typing import cast

import pytest
import torch

from kernels.native.library import built_levels, using
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.decoder import DecoderModel
from services.gpu_worker.models.loading import load_model
from shared.errors import ConfigError
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_llama import VOCAB_SIZE

LENGTHS = (1, 7, 8, 31, 64, 100)


@pytest.fixture(scope="module", params=[level.name for level in built_levels()])
def model(request: pytest.FixtureRequest, tiny):
    with using(request.param):
        yield cast(DecoderModel, load_model(tiny.folder, dtype="float32", device="cpu", quantization="int8"))


def prompt_of(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


def texts(model: DecoderModel, lengths: tuple[int, ...], chunk_size: int = 512) -> list[list[int]]:
    cache = KVCache.allocate(model.config, 200, 8, model.dtype, model.device)
    driver = EngineDriver(Engine(model, cache, EngineConfig(len(lengths), 512)))
    for length in lengths:
        params = SamplingParams(max_tokens=10, seed=0, temperature=0.0, ignore_eos=True)
        driver.add(str(length), prompt_of(length), params)
    outputs = driver.run(chunk_size=chunk_size)
    return [outputs[str(length)] for length in lengths]


def test_the_same_text_alone_in_a_batch_and_in_chunks(model: DecoderModel) -> None:
    assert "int8" in model.fingerprint
    alone = [texts(model, (length,))[0] for length in LENGTHS]
    assert texts(model, LENGTHS) == alone
    assert texts(model, LENGTHS, chunk_size=7) == alone


def test_logits_are_near_the_exact_ones(model: DecoderModel, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are the worst case: nothing in them is redundant."""
    seen: list[torch.Tensor] = []
    for kind in (model, tiny.model):
        forward = type(kind).forward
        monkeypatch.setattr(
            kind, "forward_largest", lambda *at, kind=kind, forward=forward: _kept(seen, forward(kind, *at))
        )
        texts(kind, (64,))
        monkeypatch.undo()
    rounded, exact = seen[0], seen[len(seen) // 2]  # of the same prompt's last token
    error = (rounded - exact).norm() / exact.norm()
    assert 0.001 < error < 0.1


def _kept(seen: list[torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seen.append(logits)
    return logits.argmax(-1), logits.amax(-1)


def test_what_cannot_be_rounded_is_refused(tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization 'int3': use none, int8, gguf"):
        load_model(tiny.folder, dtype="float32", device="cpu", quantization="int3")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 1}')
    with pytest.raises(ConfigError, match="int8: not for model type 'gpt2', which Transformers computes"):
        load_model(tmp_path, dtype="float32", device="cpu", quantization="int8")
