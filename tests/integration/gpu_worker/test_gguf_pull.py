"""A GGUF file becomes a Transformers folder with the weights that Transformers itself reads from it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.gpu_worker.weights.convert import convert_gguf
from services.gpu_worker.weights.pull import pull as pull_model
from shared.errors import ConfigError
from shared.model_store import resolve

ROOT = Path(__file__).parents[3]
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 64, 2, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"


def byte_alphabet() -> list[str]:
    """The 256 printable characters by which byte-level BPE writes bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]


def write_gguf(path: Path, *, tied: bool) -> None:
    """A random Llama with 8-bit and 4-bit weights and a byte-level tokenizer."""
    tokens = [*SPECIAL, *byte_alphabet(), "he", "ll"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(7)

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0) -> None:
        values = random.standard_normal(shape).astype(np.float32) * 0.05
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    if not tied:
        add("output.weight", len(tokens), HIDDEN)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add(f"blk.{i}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.attn_k.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"blk.{i}.attn_v.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN, kind=gguf.GGMLQuantizationType.Q4_1)
        add(f"blk.{i}.ffn_gate.weight", INTERMEDIATE, HIDDEN, kind=gguf.GGMLQuantizationType.Q4_1)
        add(f"blk.{i}.ffn_up.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pull(name: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """One pull by its command line, without any network: a proxy that nobody answers."""
    nowhere = "http://127.0.0.1:9"
    environment = os.environ | {"HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere, "HF_ENDPOINT": nowhere}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "services.gpu_worker.weights", "pull", name, "--home", str(home)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of a home that holds its finished folder."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tied=True)
    done = pull(str(path), path.parent)
    assert done.returncode == 0, done.stderr
    stages = [json.loads(line)["stage"] for line in done.stdout.splitlines()]
    assert stages == ["convert"] * 5 + ["ready"]
    return path


def assert_same_weights(folder: Path, path: Path, *, absent: set[str]) -> None:
    expected = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    weights = load_file(folder / "model.safetensors")
    assert set(expected) - set(weights) == absent
    for name, tensor in weights.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name].to(torch.bfloat16)), name


def test_weights_equal_those_that_transformers_reads(pulled: Path) -> None:
    assert_same_weights(resolve(str(pulled), pulled.parent).require_folder(), pulled, absent={"lm_head.weight"})


def test_untied_output_head_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "untied.gguf"
    write_gguf(path, tied=False)
    convert_gguf(path, tmp_path / "out", lambda _: None)
    assert_same_weights(tmp_path / "out", path, absent=set())


def test_folder_serves_without_the_gguf_file(pulled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(resolve(str(pulled), pulled.parent).require_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["dtype"], config["tie_word_embeddings"]) == ("bfloat16", True)
    assert "quantization_config" not in config
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert (folder / "generation_config.json").is_file()
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "hello, wörld <|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids == AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model(torch.tensor([ids])).logits.isfinite().all()


def test_broken_file_is_a_clear_error_and_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ConfigError, match=f"cannot convert {path}"):
        pull_model(str(path), tmp_path, lambda _: None)
    assert resolve(str(path), tmp_path).folder is None
    assert [p.name for p in (tmp_path / "models" / "gguf").iterdir() if not p.name.endswith(".lock")] == []
