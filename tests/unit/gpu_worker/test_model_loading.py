import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.models.config import parse_config
from services.gpu_worker.models.loading import compute_dtype, load_config, load_model
from shared.errors import ConfigError
from tests.fakes.tiny_llama import write_tiny_llama

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 2,
}


def test_defaults_of_older_folders() -> None:
    config = parse_config({**LLAMA, "rope_theta": 5e5, "torch_dtype": "float16"}, {})
    assert (config.num_kv_heads, config.head_dim, config.rope.kind, config.rope.theta) == (4, 16, "default", 5e5)
    assert (config.eos_token_ids, config.dtype, config.tie_word_embeddings) == ((2,), "float16", False)


def test_eos_ids_of_the_generation_config_win() -> None:
    assert parse_config(LLAMA, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert parse_config({**LLAMA, "eos_token_id": None}, {}).eos_token_ids == ()


def test_rope_of_transformers_4_and_5_means_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}, {})
    new = parse_config({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}, {})
    assert old.rope == new.rope
    assert old.rope.factor == 8.0


def test_architecture_stands_in_for_a_missing_type() -> None:
    config = parse_config({key: value for key, value in LLAMA.items() if key != "model_type"}, {})
    assert config.model_type == "llama"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba'.*MambaForCausalLM.*supported: llama"),
        ({"model_type": None, "architectures": None}, "not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"num_key_value_heads": 3}, "4 attention heads for 3"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_unsupported_configurations_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**LLAMA, **changes}, {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path)
    return tmp_path


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, dtype="auto", device="cpu")


def test_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors"):
        load_model(folder, dtype="auto", device="cpu")


def test_damaged_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_model(folder, dtype="auto", device="cpu")


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor 'model.norm.weight'"):
        load_model(folder, dtype="auto", device="cpu")
    save_file({**tensors, "model.norm.weight": norm[:5].clone()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'model.norm.weight' has shape \(5,\)"):
        load_model(folder, dtype="auto", device="cpu")


def test_index_must_stay_inside_its_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part.bin")
    index = {"weight_map": {"model.norm.weight": "../part.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="outside its folder"):
        load_model(folder, dtype="auto", device="cpu")


@pytest.mark.parametrize(
    ("dtype", "device", "message"), [("int7", "cpu", "dtype 'int7'"), ("auto", "nowhere", "'nowhere'")]
)
def test_unknown_dtype_and_device(dtype: str, device: str, message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(folder, dtype=dtype, device=device)


def test_progress_ends_at_one(folder: Path) -> None:
    seen: list[float] = []
    load_model(folder, dtype="auto", device="cpu", on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_bfloat16_without_instructions_for_it_keeps_its_values_in_float32(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("services.gpu_worker.models.loading.has_native_bfloat16", lambda: False)
    model = load_model(folder, dtype="bfloat16", device="cpu")
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert model.dtype == torch.float32
    assert torch.equal(model.embedding, stored.bfloat16().float())
    assert not torch.equal(model.embedding, stored)


def test_dtypes_that_a_device_computes_in(monkeypatch) -> None:
    monkeypatch.setattr("services.gpu_worker.models.loading.has_native_bfloat16", lambda: True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert compute_dtype(torch.bfloat16, cpu) == torch.bfloat16
    assert compute_dtype(torch.float16, cpu) == torch.float32
    assert compute_dtype(torch.float16, cuda) == torch.float16
