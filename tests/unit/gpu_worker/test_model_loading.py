import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gateway.text.tokenizer import TextTokenizer
from services.gpu_worker.models.decoder import DecoderModel
from services.gpu_worker.models.families import parse_config
from services.gpu_worker.models.loading import compute_dtype, load_model
from shared.errors import ConfigError
from tests.fakes.byte_model import EOS, write_byte_model
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
    assert (config.num_kv_heads, config.head_dim, config.layers[0].rope.kind, config.layers[0].rope.theta) == (
        4,
        16,
        "default",
        5e5,
    )
    assert (config.eos_token_ids, config.dtype, config.tie_word_embeddings) == ((2,), "float16", False)


def test_eos_ids_of_the_generation_config_win() -> None:
    assert parse_config(LLAMA, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert parse_config({**LLAMA, "eos_token_id": None}, {}).eos_token_ids == ()


def test_rope_of_transformers_4_and_5_means_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}, {})
    new = parse_config({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}, {})
    assert old.layers == new.layers
    assert old.layers[0].rope.factor == 8.0


def test_architecture_stands_in_for_a_missing_type() -> None:
    config = parse_config({key: value for key, value in LLAMA.items() if key != "model_type"}, {})
    assert config.model_type == "llama"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba' is not native; native are llama"),
        ({"model_type": None, "architectures": None}, "not native"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"num_key_value_heads": 3}, "4 attention heads for num_key_value_heads 3"),
        ({"hidden_size": None}, "hidden_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": "gemma2", "final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_unsupported_configurations_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**LLAMA, **changes}, {})


def test_windows_by_family() -> None:
    def windows(model_type: str, **changes) -> list[int | None]:
        raw = {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 4, "model_type": model_type, **changes}
        return [layer.window for layer in parse_config(raw, {}).layers]

    assert windows("llama", sliding_window=9) == [None] * 4
    assert windows("mistral") == [4096] * 4
    assert windows("mistral", sliding_window=None) == [None] * 4
    assert windows("qwen2", sliding_window=9, max_window_layers=2) == [None] * 4
    assert windows("qwen2", sliding_window=9, max_window_layers=2, use_sliding_window=True) == [None, None, 9, 9]
    assert windows("gemma2", sliding_window=9) == [9, None, 9, None]
    assert windows("gemma3_text", sliding_window=9, sliding_window_pattern=3) == [9, 9, None, 9]
    types = ["full_attention", "sliding_attention"] * 2
    assert windows("gemma3_text", sliding_window=9, layer_types=types) == [None, 9, None, 9]


def test_gemma3_as_it_is_published() -> None:
    """Its text part leaves out whatever is default, and older fields hold the embedding of each kind of layer."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 6,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {"model_type": "gemma3", "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "text_config": text}
    config = parse_config(raw, {})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.dtype, config.eos_token_ids, config.max_position_embeddings) == ("bfloat16", (1, 106), 131072)
    local, full = config.layers[0], config.layers[5]
    assert (local.window, local.rope.kind, local.rope.theta) == (1024, "default", 1e4)
    assert (full.window, full.rope.kind, full.rope.theta, full.rope.factor) == (None, "linear", 1e6, 8.0)


def test_rows_of_a_longrope_model_end_at_its_original_length() -> None:
    rope = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    raw = {**LLAMA, "model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": rope}
    config = parse_config({**raw, "original_max_position_embeddings": 4096}, {})
    assert config.max_position_embeddings == 4096
    assert config.layers[0].rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


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
        load_model(folder, dtype="auto", device="cpu")


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


def test_the_tokenizer_names_the_end_where_the_configuration_does_not(folder: Path) -> None:
    """The gateway hides that token as the end, so a worker that went on past it would never stop."""
    config = json.loads((folder / "config.json").read_text())
    write_byte_model(folder)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    assert load_model(folder, dtype="auto", device="cpu").config.eos_token_ids == (EOS,)
    assert TextTokenizer.from_folder(folder).eos_token_ids == (EOS,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model(folder, dtype="auto", device="cpu").config.eos_token_ids == (5, 6)
    assert TextTokenizer.from_folder(folder).eos_token_ids == (5, 6)


def test_progress_ends_at_one(folder: Path) -> None:
    seen: list[float] = []
    load_model(folder, dtype="auto", device="cpu", on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_bfloat16_without_instructions_for_it_keeps_its_values_in_float32(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("services.gpu_worker.models.loading.has_native_bfloat16", lambda: False)
    model = load_model(folder, dtype="bfloat16", device="cpu")
    assert isinstance(model, DecoderModel)
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
