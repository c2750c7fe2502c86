"""The decoder as one native call per step: the same logits as operation by operation, at any dispatch level."""

import json
import random
from pathlib import Path
from typing import cast

import pytest
import torch

from kernels.native.library import built_levels, using
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.decoder import DecoderModel
from services.gpu_worker.models.families import parse_config
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import ForwardInputs
from services.gpu_worker.models.weights import open_weights
from services.gpu_worker.service.loading import missing_kernels
from shared.errors import ConfigError
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_llama import VOCAB_SIZE, generate, write_tiny_llama

LEVELS = [level.name for level in built_levels()]
LENGTHS = (1, 8, 31, 100)
BF16, CPU = torch.bfloat16, torch.device("cpu")


class Recorder:
    """Wraps the passes of a model: keeps their inputs, and counts those that store no logits."""

    def __init__(self, model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[ForwardInputs, torch.Tensor]] = []
        self.unstored = 0
        forward, largest = model.forward, model.forward_largest

        def both(inputs: ForwardInputs, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
            self.unstored += 1
            self.steps.append((inputs, forward(inputs, cache)))
            return largest(inputs, cache)

        monkeypatch.setattr(model, "forward_largest", both)


def load(folder: Path, level: str | None, dtype: str = "float32") -> DecoderModel:
    with using(level):
        return cast(DecoderModel, load_model(folder, dtype=dtype, device="cpu"))


def run(model: DecoderModel, num_tokens: int, *, chunk_size: int = 512) -> tuple[dict[str, list[int]], KVCache]:
    cache = KVCache.allocate(model.config, 100, 8, model.dtype, model.device)
    cache.data.fill_(float("nan"))
    driver = EngineDriver(Engine(model, cache, EngineConfig(len(LENGTHS), 512)))
    params = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)
    for length in LENGTHS:
        driver.add(str(length), prompt_of(length), params)
    return driver.run(chunk_size=chunk_size), cache


def prompt_of(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("variant", ["grouped_tied", "llama3_rope_biased", "linear_rope_one_to_one"])
@pytest.mark.parametrize("level", LEVELS)
def test_one_call_gives_what_the_operations_give(
    tmp_path: Path, level: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_llama(tmp_path, variant)
    model = load(tmp_path, level)
    recorder = Recorder(model, monkeypatch)
    with using(level):
        _, cache = run(model, 4, chunk_size=40)
        assert model.is_native and recorder.unstored == len(recorder.steps) > 5
        for inputs, logits in recorder.steps:
            # A step may be repeated: it writes the same keys and values to the same slots.
            expected = model.forward_by_operations(inputs, cache)
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            tokens, largest = DecoderModel.forward_largest(model, inputs, cache)
            assert torch.equal(tokens, logits.argmax(-1)) and torch.equal(largest, logits.amax(-1))


@pytest.mark.parametrize("level", [*LEVELS, None])
def test_text_is_that_of_transformers(tmp_path: Path, level: str | None) -> None:
    """Also by torch alone."""
    peer = write_tiny_llama(tmp_path)
    model = load(tmp_path, level)
    assert model.is_native == (level is not None)
    with using(level):
        outputs, _ = run(model, 12)
    assert outputs == {str(length): generate(peer, prompt_of(length), 12) for length in LENGTHS}


def test_bfloat16_is_not_handed_to_products_that_read_float32(tmp_path: Path) -> None:
    """At levels without an instruction for bfloat16, a model that was made in it all the same goes by operations."""
    write_tiny_llama(tmp_path)
    texts = {}
    for level in LEVELS:
        with using(level) as library, open_weights(tmp_path, dtype=BF16, rounded_to=BF16, device=CPU) as weights:
            config = parse_config(json.loads((tmp_path / "config.json").read_text()), {})
            model = DecoderModel(config, weights, dtype=BF16, stored_dtype=BF16, device=CPU)
            assert library is not None and model.is_native == library.takes_bfloat16
            texts[level], _ = run(model, 4)
    with using(None):
        peer, _ = run(cast(DecoderModel, load_model(tmp_path, dtype="bfloat16", device="cpu")), 4)
    for text in texts.values():
        assert {name: tokens[0] for name, tokens in text.items()} == {name: tokens[0] for name, tokens in peer.items()}


def test_tables_reach_as_far_as_the_longest_row_that_is_served(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    model = cast(DecoderModel, load_model(tmp_path, dtype="float32", device="cpu", max_model_len=100))
    assert model.num_positions == 100
    if model.native is not None:
        assert {len(layer.rotation) for layer in model.native.tensors.layers} == {100}
    cache = KVCache.allocate(model.config, 20, 8, model.dtype, model.device)
    Engine(model, cache, EngineConfig(2, 100))
    with pytest.raises(ConfigError, match="max_model_len 101: the model has 100 positions"):
        Engine(model, cache, EngineConfig(2, 101))


def test_a_row_that_samples_stores_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llama(tmp_path)
    model = load(tmp_path, LEVELS[0] if LEVELS else None)
    recorder = Recorder(model, monkeypatch)
    cache = KVCache.allocate(model.config, 20, 8, model.dtype, model.device)
    driver = EngineDriver(Engine(model, cache, EngineConfig(2, 64)))
    driver.add("greedy", prompt_of(5), SamplingParams(max_tokens=3, seed=0, temperature=0.0, ignore_eos=True))
    driver.add("drawn", prompt_of(6), SamplingParams(max_tokens=6, seed=1, temperature=1.0, ignore_eos=True))
    outputs = driver.run()
    assert recorder.unstored == 0
    assert [len(outputs[name]) for name in ("greedy", "drawn")] == [3, 6]


def test_a_worker_without_kernels_warns_of_it() -> None:
    for level in LEVELS:
        with using(level):
            assert missing_kernels(CPU) == ""
    with using(None):
        assert "python -m kernels.native.build" in missing_kernels(CPU)


def test_fingerprint_names_level_and_kernels(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    names = {level: load(tmp_path, level).fingerprint for level in [*LEVELS, None]}
    assert len(set(names.values())) == len(names)
    for level, name in names.items():
        assert (f"{level}-f32" if level else "torch") in name
        assert ("one-call" in name) == (level is not None)
