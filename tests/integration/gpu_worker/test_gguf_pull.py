"""A GGUF file becomes a Transformers folder with the weights that Transformers itself reads from it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.gpu_worker.models.loading import load_model
from services.gpu_worker.weights.convert import convert_gguf
from services.gpu_worker.weights.pull import pull as pull_model
from shared.errors import ConfigError
from shared.model_store import gguf_files, resolve
from tests.fakes.tiny_gguf import TEMPLATE, write_gguf

ROOT = Path(__file__).parents[3]


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


def test_the_file_stays_in_reach_of_its_folder(pulled: Path) -> None:
    """Of the user's file there is a link, and its mode is the user's. A pull that asks for it brings it back."""
    folder = resolve(str(pulled), pulled.parent).require_folder()
    (kept,) = gguf_files(folder)
    assert kept.is_symlink() and kept.resolve() == pulled.resolve()
    mode = pulled.stat().st_mode
    kept.unlink()
    assert pull_model(str(pulled), pulled.parent, lambda _: None) == folder and not gguf_files(folder)
    config = (folder / "config.json").stat()
    assert pull_model(str(pulled), pulled.parent, lambda _: None, with_gguf=True) == folder
    assert gguf_files(folder) == [kept] and pulled.stat().st_mode == mode
    assert (folder / "config.json").stat() == config, "nothing else was made anew"


def test_a_model_without_such_a_file_cannot_be_asked_for_one(pulled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(resolve(str(pulled), pulled.parent).require_folder(), folder, ignore=lambda *_: ["tiny.gguf"])
    with pytest.raises(ConfigError, match=r"has no \.gguf file"):
        pull_model(str(folder), tmp_path, lambda _: None, with_gguf=True)


def test_its_blocks_are_loaded_from_the_folder(pulled: Path) -> None:
    """Queries and keys in Q8_0, the MLP's gate in Q4_1 and its other half in Q8_0: they are fused in Q8_0."""
    model = load_model(
        resolve(str(pulled), pulled.parent).require_folder(), dtype="auto", device="cpu", quantization="gguf"
    )
    assert "q4_1" in model.fingerprint and "q8_0" in model.fingerprint


def test_broken_file_is_a_clear_error_and_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ConfigError, match=f"cannot convert {path}"):
        pull_model(str(path), tmp_path, lambda _: None)
    assert resolve(str(path), tmp_path).folder is None
    assert [p.name for p in (tmp_path / "models" / "gguf").iterdir() if not p.name.endswith(".lock")] == []
