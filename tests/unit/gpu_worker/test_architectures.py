"""Every architecture gives Transformers' logits, whatever mixture of prefill, chunks and decode computes them."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from kernels.kv_layout.api import KVLayout
from kernels.native.library import built_levels
from services.gpu_worker.cache.kv_cache import KVCache, cache_dtype
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.decoder import DecoderModel
from services.gpu_worker.models.fallback import TransformersModel
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import ForwardInputs, Model, largest_of
from shared.errors import ConfigError
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_models import (
    FALLBACK,
    NATIVE,
    VOCAB_SIZE,
    WINDOW,
    Tiny,
    logits_of,
    write_tiny,
    write_tiny_gemma3_with_vision,
)

SIZES = {"a": 40, "b": 77, "c": 6}
"""Prompts: two are longer than the window, the third outgrows it while it decodes."""
NUM_NEW = 24
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class Recording:
    """A model whose logits are kept, with the positions of the tokens they follow."""

    def __init__(self, model: Model) -> None:
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.stored_dtype, self.num_positions = model.stored_dtype, model.num_positions
        self.fingerprint, self.attention_s = model.fingerprint, 0.0
        self._model = model
        self.last: dict[int, torch.Tensor] = {}

    def forward(self, inputs: ForwardInputs, cache: KVCache) -> torch.Tensor:
        logits = self._model.forward(inputs, cache)
        at = inputs.positions if inputs.sample_at is None else inputs.positions[inputs.sample_at]
        self.last = dict(zip(at.tolist(), logits, strict=True))
        return logits

    def forward_largest(self, inputs: ForwardInputs, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        return largest_of(self.forward(inputs, cache))


def prompt_of(size: int) -> list[int]:
    draw = random.Random(size)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(size)]


def driver_of(model: Model, layout: KVLayout | None = None) -> tuple[EngineDriver, Recording]:
    """An engine on a cache that is NaN throughout."""
    recording = Recording(model)
    cache = KVCache.allocate(model.config, 40, 8, model.dtype, model.device, layout)
    cache.data.fill_(float("nan"))
    config = EngineConfig(4, min(256, model.num_positions))
    return EngineDriver(Engine(recording, cache, config)), recording


def step(driver: EngineDriver, recording: Recording, seen: dict[str, dict[int, torch.Tensor]]) -> None:
    """One step; its logits go to the requests whose last token they follow."""
    live = {len(r.tokens) - 1: r for r in driver.requests.values() if r.row is not None}
    assert len(live) == sum(r.row is not None for r in driver.requests.values()), "positions must tell rows apart"
    driver.step(chunk_size=16)
    for position, logits in recording.last.items():
        seen[live[position].request_id][position] = logits


def check_logits(model: Model, peer: PreTrainedModel, layout: KVLayout | None = None) -> None:
    """Rows that join one after another: whole prompts, chunks beside decode, decode of all three."""
    driver, recording = driver_of(model, layout)
    params = SamplingParams(max_tokens=NUM_NEW, seed=0, temperature=0.0, ignore_eos=True)
    seen: dict[str, dict[int, torch.Tensor]] = {request_id: {} for request_id in SIZES}
    for request_id, size in SIZES.items():
        driver.add(request_id, prompt_of(size), params)
        for _ in range(4):
            step(driver, recording, seen)
    while any(r.row is not None for r in driver.requests.values()):
        step(driver, recording, seen)
    for request_id, size in SIZES.items():
        request = driver.requests[request_id]
        positions = list(range(size - 1, size - 1 + NUM_NEW))
        assert sorted(seen[request_id]) == positions, request_id
        expected = logits_of(peer, request.tokens)[positions]
        actual = torch.stack([seen[request_id][position] for position in positions])
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert request.output == expected.argmax(-1).tolist()


@pytest.mark.parametrize("name", NATIVE)
def test_native_architectures(name: str, tmp_path: Path) -> None:
    peer = write_tiny(tmp_path, NATIVE[name])
    model = load_model(tmp_path, dtype="float32", device="cpu")
    assert isinstance(model, DecoderModel)
    check_logits(model, peer)


@pytest.mark.skipif(not built_levels(), reason="the contract is the C++ kernels'")
@pytest.mark.parametrize("name", ["mistral", "qwen3", "phi3", "gemma2", "gemma3"])
def test_bfloat16_text_does_not_depend_on_how_work_is_cut(name: str, tmp_path: Path) -> None:
    """Windows, soft caps and norms of heads keep the numerics contract: the same bits in any batch and chunk."""
    write_tiny(tmp_path, NATIVE[name])
    model = load_model(tmp_path, dtype="bfloat16", device="cpu")
    dtype = cache_dtype(model.stored_dtype, model.dtype, model.config, 8, model.device)
    assert dtype == torch.bfloat16
    params = SamplingParams(max_tokens=12, seed=0, temperature=0.0, ignore_eos=True)

    def texts(sizes: list[int], chunk_size: int) -> list[list[int]]:
        driver = EngineDriver(
            Engine(model, KVCache.allocate(model.config, 60, 8, dtype, model.device), EngineConfig(4, 256))
        )
        requests = [driver.add(str(size), prompt_of(size), params) for size in sizes]
        driver.run(chunk_size=chunk_size)
        return [request.output for request in requests]

    sizes = [5, 24, 63, 100]
    alone = [texts([size], 256)[0] for size in sizes]
    assert texts(sizes, 256) == texts(sizes, 7) == alone
    assert len({tuple(text) for text in alone}) == len(sizes), "prompts must lead to different texts"


def test_the_text_part_of_a_model_that_sees(tmp_path: Path) -> None:
    peer = write_tiny_gemma3_with_vision(tmp_path)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    assert isinstance(model, DecoderModel)
    check_logits(model, peer)


@pytest.mark.parametrize("name", FALLBACK)
def test_architectures_that_transformers_computes(name: str, tmp_path: Path) -> None:
    peer = write_tiny(tmp_path, FALLBACK[name])
    model = load_model(tmp_path, dtype="float32", device="cpu")
    assert isinstance(model, TransformersModel)
    check_logits(model, peer)


WITH_WINDOWS = [(NATIVE, "mistral"), (NATIVE, "gemma2"), (FALLBACK, "mixtral")]


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize(("table", "name"), WITH_WINDOWS)
def test_windows_and_caps_in_each_layout_of_the_cache(
    table: dict[str, Tiny], name: str, layout: KVLayout, tmp_path: Path
) -> None:
    peer = write_tiny(tmp_path, table[name])
    check_logits(load_model(tmp_path, dtype="float32", device="cpu"), peer, layout)


@pytest.mark.parametrize(("table", "name"), WITH_WINDOWS)
def test_windows_matter_in_these_tests(table: dict[str, Tiny], name: str, tmp_path: Path) -> None:
    """The same weights without a window give other logits past it, and equal ones within it."""
    peer = write_tiny(tmp_path, table[name])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["sliding_window"] == WINDOW
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 200}))
    model = load_model(tmp_path, dtype="float32", device="cpu")
    driver, recording = driver_of(model)
    driver.add("a", prompt_of(77), SamplingParams(max_tokens=1, seed=0, temperature=0.0))
    driver.add("c", prompt_of(6), SamplingParams(max_tokens=1, seed=0, temperature=0.0))
    driver.step()
    torch.testing.assert_close(recording.last[5], logits_of(peer, prompt_of(6))[-1], rtol=1e-4, atol=1e-4)
    assert (recording.last[76] - logits_of(peer, prompt_of(77))[-1]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("bloom", {"hidden_size": 32, "n_head": 2, "n_layer": 2}, "0 of num_hidden_layers 2 attend"),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, "cannot"),
        ("stablelm", SMALL, "do not hand arguments"),
        ("gpt_oss", {**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
        ("falcon_h1", {**SMALL, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16}, "layer_types hybrid"),
        ("llama4_text", {**SMALL, "num_local_experts": 2, "intermediate_size_mlp": 32}, "chunked_attention"),
        ("deepseek_v3", {**SMALL, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}, "differ in shape"),
    ],
)
def test_models_that_cannot_run_over_a_paged_cache_are_refused(
    model_type: str, options: dict, message: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{model_type}.*{message}"):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_a_model_with_state_of_its_own_fails_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token also looks at its predecessor's activations, which a decode step does not see."""
    write_tiny(tmp_path, FALLBACK["gpt2"])
    plain = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, hidden: plain(self, hidden + hidden.roll(1, dims=-2)))
    with pytest.raises(ConfigError, match=r"gpt2.*keeps state beside keys and values"):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(ConfigError, match="nonesuch"):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_code_in_a_folder_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nfrom transformers import GPT2Config as C, GPT2LMHeadModel as M\n"
    (tmp_path / "own.py").write_text(code)
    auto_map = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    with pytest.raises(ConfigError, match="own"):
        load_model(tmp_path, dtype="float32", device="cpu")
    write_tiny(tmp_path, FALLBACK["gpt2"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    assert isinstance(load_model(tmp_path, dtype="float32", device="cpu"), TransformersModel)
    assert not ran.exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    """Case 135."""
    write_tiny(tmp_path, FALLBACK["gpt2"])
    (tmp_path / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_missing_weights_of_the_fallback_are_named(tmp_path: Path) -> None:
    write_tiny(tmp_path, FALLBACK["gpt2"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.ln_1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing keys: transformer\.h\.1\.ln_1\.weight"):
        load_model(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_fallback_facts(name: str, tmp_path: Path) -> None:
    """End ids come from the generation config; a dtype without instructions for it is computed as float32."""
    write_tiny(tmp_path, FALLBACK[name])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    model = load_model(tmp_path, dtype="float16", device="cpu")
    assert model.dtype == torch.float32
    assert model.config.eos_token_ids == (7, 9)
    assert model.config.max_position_embeddings == 256
    assert f":{name}-" in model.fingerprint
