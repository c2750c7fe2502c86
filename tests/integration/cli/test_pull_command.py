"""`pagewire pull` where nothing is to be fetched, and where nothing can be."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.gpu_worker.weights.install import exclusive
from shared.model_store import DEFAULT_MODEL, resolve


def pull(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", "pull", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.model
def test_a_model_in_the_cache_is_told_at_once(model_folder: Path) -> None:
    done = pull()
    assert (done.returncode, done.stdout) == (0, f"{model_folder}\n"), done.stderr
    assert model_folder.name == DEFAULT_MODEL


def test_no_model_of_that_name_is_one_line(tmp_path: Path) -> None:
    done = pull("nonsense", "--home", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: model 'nonsense'")


def test_a_broken_file_is_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    done = pull(str(tmp_path / "broken.gguf"), "--home", str(tmp_path / "home"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: cannot get model '{tmp_path}/broken.gguf': ")
    assert not list((tmp_path / "home").rglob("config.json"))


def test_ctrl_c_ends_a_pull_and_its_process(tmp_path: Path) -> None:
    """The pull waits for another one of the same model."""
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF")
    command = [sys.executable, "-m", "services.cli", "pull", str(gguf), "--home", str(tmp_path)]
    with (
        exclusive(resolve(str(gguf), tmp_path).target, lambda progress: None),
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        assert process.stderr.readline().startswith("waiting for another pull of")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert not children[0].is_running()
