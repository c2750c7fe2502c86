"""`make kernels-report` and `make gpu-check`, as far as a machine without a GPU can tell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


def run_module(module: str, *arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """A process of its own: in this one Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path[1:]))}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


def test_a_kernel_is_compiled_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    figures = tmp_path / "report.json"
    options = ("--targets", "sm_90", "gfx942", "--only", "decode d64 bf16 kv float8", "--jobs", "1", "--json")
    done = run_module("benchmarks.kernels_report", *options, str(figures), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(figures.read_text())
    for target in ("sm_90", "gfx942"):
        (row,) = report["tables"][target]
        assert row["kernel"] == "decode d64 bf16 kv float8_e4m3fn"
        assert 32 < row["registers"] <= 512 and row["shared KiB"] > 1 and row["spilled"] == 0
    assert [(bar["name"], bar["met"]) for bar in report["bars"]] == [("spills on sm_90", True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_check_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    done = run_module("benchmarks.gpu_check", cache=tmp_path)
    assert done.returncode == 2
    assert "sees no GPU here; nothing was checked" in done.stderr
