"""Names of models → folders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.model_store import DEFAULT_MODEL, ModelSource, gguf_files, is_complete, missing_files, resolve


def make_model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("name", ["", DEFAULT_MODEL])
def test_default_model_is_absent_until_its_cache_folder_is_complete(name: str, tmp_path: Path) -> None:
    model = resolve(name, tmp_path)
    assert (model.source, model.folder, model.served_name) == (ModelSource.DEFAULT, None, DEFAULT_MODEL)
    with pytest.raises(ConfigError, match="pagewire pull"):
        model.require_folder()
    make_model_folder(model.target)
    assert resolve(name, tmp_path).require_folder() == model.target


def test_cache_folder_without_weights_does_not_count(tmp_path: Path) -> None:
    target = resolve("", tmp_path).target
    target.mkdir(parents=True)
    (target / "config.json").write_text("{}")
    assert resolve("", tmp_path).folder is None


def test_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "my-model")
    model = resolve(str(folder), tmp_path / "home")
    assert (model.source, model.folder, model.served_name) == (ModelSource.FOLDER, folder, "my-model")


def test_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_folder(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    assert resolve("./my-model", tmp_path).folder == folder.resolve()


@pytest.mark.parametrize("absent", ["config.json", "model.safetensors"])
def test_incomplete_folder_names_the_missing_file(absent: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m")
    (folder / absent).unlink()
    with pytest.raises(ConfigError, match=r"config\.json" if absent == "config.json" else r"safetensors"):
        resolve(str(folder), tmp_path)


def test_every_shard_of_the_index_must_be_there(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / weight_map["a"]).write_bytes(b"")
    assert missing_files(folder) == [weight_map["b"]]


def test_gguf_file_gets_a_cache_folder_of_its_content(tmp_path: Path) -> None:
    gguf = tmp_path / "Tiny.Q4_1.gguf"
    gguf.write_bytes(b"GGUF")
    first = resolve(str(gguf), tmp_path)
    assert (first.source, first.folder, first.served_name) == (ModelSource.GGUF, None, "Tiny.Q4_1")
    assert resolve(str(gguf), tmp_path).target == first.target
    gguf.write_bytes(b"GGUF, but another one")
    assert resolve(str(gguf), tmp_path).target != first.target


def test_a_folder_with_nothing_but_a_gguf_file_stands_for_the_file(tmp_path: Path) -> None:
    folder, home = tmp_path / "tiny", tmp_path / "home"
    folder.mkdir()
    file = folder / "Tiny.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    model = resolve(str(folder), home)
    assert (model.source, model.target, model.gguf) == (ModelSource.GGUF, resolve(str(file), home).target, file)
    (folder / "Other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(str(folder), home)


def test_a_folder_is_complete_with_its_gguf_file_only_if_that_is_asked_for(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "m")
    model = resolve(str(folder), tmp_path)
    assert [is_complete(model, with_gguf=asked) for asked in (False, True)] == [True, False]
    link = folder / "m.gguf"
    link.symlink_to(tmp_path / "gone.gguf")
    assert not is_complete(model, with_gguf=True), "the file that the link means is gone"
    (tmp_path / "gone.gguf").write_bytes(b"GGUF")
    assert is_complete(model, with_gguf=True) and gguf_files(folder) == [link]
    assert not is_complete(resolve("", tmp_path), with_gguf=False)


def test_gguf_file_that_is_absent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        resolve(str(tmp_path / "no.gguf"), tmp_path)


def test_hub_name_has_a_cache_folder_and_keeps_its_name(tmp_path: Path) -> None:
    model = resolve("org/model-1.5", tmp_path)
    assert (model.source, model.folder, model.served_name) == (ModelSource.HUB, None, "org/model-1.5")
    assert model.target.is_relative_to(tmp_path)
    make_model_folder(model.target)
    assert resolve("org/model-1.5", tmp_path).folder == model.target


@pytest.mark.parametrize(
    "name", ["gpt", "/no/such/folder", "./no/such", "a/b/c", "../model", "org/", "/model", "org/.."]
)
def test_other_names_say_what_was_tried(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"default model .* folder .* \.gguf .* hub name"):
        resolve(name, tmp_path)


def test_importing_the_store_loads_no_torch() -> None:
    code = "import sys, shared.model_store; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
