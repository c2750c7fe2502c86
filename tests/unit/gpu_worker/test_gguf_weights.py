"""A model whose weights stay in the blocks of a GGUF file: Transformers' numbers under Transformers' names, near the
logits of the same weights without rounded activations, and the same text however its work is cut."""

import random
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kernels.linear.blocks import BlockForm, BlockWeight, round_to_q8_0
from kernels.native.library import built_levels, using
from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.decoder import DecoderModel
from services.gpu_worker.models.gguf_weights import open_gguf
from services.gpu_worker.models.loading import load_model
from shared.errors import ConfigError
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.gguf_tensors import Kind, load_rounded, write_gguf
from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, Tiny, logits_of, write_tiny

LLAMA = Tiny("llama", {**NATIVE["qwen2"].options, "hidden_size": 128, "intermediate_size": 192, "attention_bias": True})
ARCHITECTURES = {
    "llama": ("llama", LLAMA),
    "mistral": ("llama", NATIVE["mistral without window"]),
    "qwen2": ("qwen2", NATIVE["qwen2"]),
    "qwen3": ("qwen3", NATIVE["qwen3"]),
    "phi3": ("phi3", NATIVE["phi3"]),
    "gemma2": ("gemma2", NATIVE["gemma2"]),
    "gemma3": ("gemma3", NATIVE["gemma3"]),
}
LENGTHS = (1, 7, 8, 31, 64, 100)
NUM_TOKENS = 10


def kinds(name: str) -> Kind:
    """As files of four bits are made: the embedding in eight; values and the MLP's end in another form."""
    if name.startswith(("token_embd", "output")):
        return Kind.Q8_0
    return Kind.Q4_1 if "ffn_down" in name or "attn_output" in name else Kind.Q4_0


def write(folder: Path, tiny: Tiny, architecture: str) -> PreTrainedModel:
    """A folder with a GGUF file, and the same model with the file's numbers as Transformers runs it."""
    peer = write_tiny(folder, tiny)
    write_gguf(folder / "model.gguf", peer, architecture, kinds)
    load_rounded(peer, kinds, architecture)
    (folder / "model.safetensors").unlink()  # what is not read must not be needed
    return peer


def load(folder: Path) -> DecoderModel:
    return cast(DecoderModel, load_model(folder, dtype="float32", device="cpu", quantization="gguf"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("gguf-llama")
    return folder, write(folder, LLAMA, "llama")


@pytest.fixture(scope="module", params=[level.name for level in built_levels()])
def model(request: pytest.FixtureRequest, llama: tuple[Path, PreTrainedModel]):
    with using(request.param):
        yield load(llama[0])


def prompt_of(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


def driver_of(model: DecoderModel, num_rows: int) -> EngineDriver:
    cache = KVCache.allocate(model.config, 200, 8, model.dtype, model.device)
    cache.data.fill_(float("nan"))
    return EngineDriver(Engine(model, cache, EngineConfig(num_rows, 256)))


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0, ignore_eos=True)


def texts(
    model: DecoderModel, prompts: list[list[int]], chunk_size: int = 512, num_tokens: int = NUM_TOKENS
) -> list[list[int]]:
    driver = driver_of(model, len(prompts))
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt, greedy(num_tokens))
    outputs = driver.run(chunk_size=chunk_size)
    return [outputs[str(number)] for number in range(len(prompts))]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_near_those_of_the_numbers_in_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only activations are rounded. A tensor left out, permuted or mixed up would make the logits unlike these."""
    architecture, tiny = ARCHITECTURES[name]
    peer, model = write(tmp_path, tiny, architecture), load(tmp_path)
    seen: list[torch.Tensor] = []
    forward = DecoderModel.forward
    monkeypatch.setattr(DecoderModel, "forward_largest", lambda *at: _kept(seen, forward(*at)))
    prompt = prompt_of(40)
    texts(model, [prompt], num_tokens=1)
    expected = logits_of(peer, prompt)[-1]
    error = (seen[-1][0] - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05


def _kept(seen: list[torch.Tensor], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seen.append(logits)
    return logits.argmax(-1), logits.amax(-1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, tiny = ARCHITECTURES[name]
    peer = write(tmp_path, tiny, architecture)
    config = load(tmp_path).config
    with open_gguf(tmp_path / "model.gguf", config, torch.float32) as weights:
        for full_name, expected in peer.state_dict().items():
            if full_name == "lm_head.weight" and config.tie_word_embeddings:
                assert full_name not in weights
                continue
            shape = tuple(expected.shape)
            torch.testing.assert_close(weights.get(full_name, shape), expected, rtol=0, atol=1e-6)
            if len(shape) == 2:
                block = weights.projection([full_name], [cast(tuple[int, int], shape)])
                assert isinstance(block, BlockWeight)
                assert torch.equal(block.dequantized(), weights.get(full_name, shape))


def test_the_same_text_alone_in_a_batch_in_chunks_and_after_a_recompute(model: DecoderModel) -> None:
    assert model.is_native
    prompts = [prompt_of(length) for length in LENGTHS]
    alone = [texts(model, [prompt])[0] for prompt in prompts]
    assert texts(model, prompts) == alone
    assert texts(model, prompts, chunk_size=7) == alone
    again = [prompt + text[:4] for prompt, text in zip(prompts, alone, strict=True)]
    assert texts(model, again, num_tokens=NUM_TOKENS - 4) == [text[4:] for text in alone]
    assert len({tuple(text) for text in alone}) == len(alone), "prompts must lead to different texts"


def test_the_same_text_with_a_prefix_hit(model: DecoderModel) -> None:
    expected = texts(model, [prompt_of(64)])[0]
    driver = driver_of(model, 2)
    first = driver.add("first", prompt_of(64), greedy())
    driver.step()
    driver.step()
    driver.add("second", prompt_of(64), greedy(), hits=first.blocks[:7])
    assert driver.run() == {"first": expected, "second": expected}


def test_the_fingerprint_names_every_form_of_block(model: DecoderModel, llama: tuple[Path, PreTrainedModel]) -> None:
    assert [form in model.fingerprint for form in ("q8_0", "q4_0", "q4_1", "int8", "bf16")] == [True] * 3 + [False] * 2
    with using(None):
        plain = load(llama[0])
    assert plain.fingerprint != model.fingerprint and "torch-q4_0" in plain.fingerprint
    assert not plain.is_native and len(texts(plain, [prompt_of(8)])[0]) == NUM_TOKENS


def write_types(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for name, (raw, kind) in tensors.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_types_without_a_kernel_become_q8_0_and_plain_numbers_stay(
    llama: tuple[Path, PreTrainedModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = np.random.default_rng(0)
    q6 = draw.integers(0, 256, (4, 210), np.uint8)
    q6[:, 208:] = np.full((4, 1), 0.01, np.float16).view(np.uint8)
    plain = draw.normal(size=(4, 256)).astype(np.float16)
    q4 = gguf.quants.quantize(plain.astype(np.float32), Kind.Q4_0)
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    write_types(
        tmp_path / "model.gguf",
        {
            "blk.0.ffn_gate.weight": (q6, Kind.Q6_K),
            "blk.0.ffn_up.weight": (q4, Kind.Q4_0),
            "blk.0.ffn_down.weight": (plain, Kind.F16),
        },
    )
    shape = (4, 256)
    caplog.set_level("INFO")
    with open_gguf(tmp_path / "model.gguf", load(llama[0]).config, torch.float32) as weights:
        rounded = weights.projection(names[:1], [shape])
        exact = torch.from_numpy(gguf.quants.dequantize(q6, Kind.Q6_K))
        assert isinstance(rounded, BlockWeight) and rounded.form is BlockForm.Q8_0
        assert torch.equal(rounded.dequantized(), round_to_q8_0(exact).dequantized())
        assert torch.equal(weights.get(names[0], shape), exact)
        assert torch.equal(cast(torch.Tensor, weights.projection(names[2:], [shape])), torch.from_numpy(plain).float())
        fused = weights.projection(names[:2], [shape, shape])  # of two types
        assert isinstance(fused, BlockWeight) and fused.form is BlockForm.Q8_0
        assert torch.equal(fused.dequantized()[4:], torch.from_numpy(gguf.quants.dequantize(q4, Kind.Q4_0)))
        with pytest.raises(ConfigError, match=r"has shape \(4, 256\), the configuration says \(4, 128\)"):
            weights.get(names[0], (4, 128))
        with pytest.raises(ConfigError, match=r"no tensor for 'lm_head\.weight'"):
            weights.get("lm_head.weight", shape)
    assert "rounded to Q8_0: {'Q6_K': 1}" in caplog.text


def test_what_has_no_blocks_to_load_is_refused(llama: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    write_tiny(tmp_path, LLAMA)
    with pytest.raises(ConfigError, match=r"quantization gguf: .* has no \.gguf file; `pagewire pull --gguf"):
        load(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF, but not really")
    with pytest.raises(ConfigError, match=r"model\.gguf"):
        load(tmp_path)
    file.unlink()
    write_types(file, {"blk.0.ffn_up.weight": (np.zeros((2, 2), np.float32), Kind.F32)}, "rwkv6")
    with pytest.raises(ConfigError, match="gguf: not for architecture 'rwkv6', only llama, "):
        load(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has 2 \.gguf files"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="quantization gguf is for CPUs"):
        load_model(llama[0], dtype="float32", device="meta", quantization="gguf")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 1}')
    with pytest.raises(ConfigError, match="gguf: not for model type 'gpt2', which Transformers computes"):
        load(tmp_path)
