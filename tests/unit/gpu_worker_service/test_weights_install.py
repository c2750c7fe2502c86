"""A model folder appears whole or not at all, also when pulls are interrupted or run at once."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.gpu_worker.weights.install import exclusive, new_folder
from services.gpu_worker.weights.progress import Progress
from shared.model_store import resolve


def fill(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w")


def test_folder_is_invisible_until_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_folder(target) as folder:
        fill(folder)
        assert not target.exists()
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="interrupted"), new_folder(tmp_path / "model") as folder:
        fill(folder)
        raise RuntimeError("interrupted")
    assert list(tmp_path.iterdir()) == []


def test_incomplete_result_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="safetensors"), new_folder(tmp_path / "model") as folder:
        (folder / "config.json").write_text("{}")
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_pull_are_replaced(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, os, signal\n"
        "from services.gpu_worker.weights.install import new_folder\n"
        "with new_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = resolve("", tmp_path).target
    target.parent.mkdir(parents=True)
    root = Path(__file__).parents[3]
    died = subprocess.run([sys.executable, "-c", code, str(target)], cwd=root, check=False)
    assert died.returncode == -9
    assert [path.name for path in target.parent.iterdir()] == [f".{target.name}.partial"]
    assert resolve("", tmp_path).folder is None
    with new_folder(target) as folder:
        fill(folder)
    assert not (target / "half").exists()
    assert resolve("", tmp_path).folder == target


def test_second_pull_waits_and_says_so(tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"
    seen: list[Progress] = []
    order: list[str] = []

    def second() -> None:
        with exclusive(target, seen.append):
            order.append("second")

    thread = threading.Thread(target=second)
    with exclusive(target, seen.append):
        thread.start()
        while not seen:
            time.sleep(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert {progress.stage for progress in seen} == {"wait"}
