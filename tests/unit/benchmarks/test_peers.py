"""The comparison with peers: its arithmetic, and what it says when a peer is not there."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.machine import Load, Machine, ModelSize, instruction_sets
from benchmarks.peers import figures
from benchmarks.peers.__main__ import run_rounds
from benchmarks.peers.figures import Median
from benchmarks.peers.plot import write_plot
from benchmarks.peers.servers import NotThere, child, contenders
from benchmarks.report import Report
from services.cli import bench

SETUP = Path(__file__).parents[3] / "benchmarks" / "peers" / "setup.sh"


def report(tokens_per_s: float, p99: float = 10.0) -> bench.Report:
    times = {"mean": 1.0, "p50": 2.0, "p99": p99}
    return bench.Report(8, 16, 16, 0, {}, 1.0, 1680, 1024, tokens_per_s, 1.0, times, times, times)


def medians(**speeds: tuple[float, float]) -> dict[tuple[str, int], Median]:
    """(tokens/s, p99 ITL) of contenders at 8 streams."""
    names = {"ours": figures.BF16, "vllm": figures.VLLM, "llama": figures.LLAMA}
    return {(names[key], 8): Median(speed, 1.0, 2.0, 3.0, p99) for key, (speed, p99) in speeds.items()}


def test_each_figure_is_the_median_of_its_rounds() -> None:
    runs = {"a": {8: [report(100.0, 30.0), report(300.0, 10.0), report(200.0, 20.0)]}}
    assert figures.medians_of(runs) == {("a", 8): Median(200.0, 2.0, 20.0, 2.0, 20.0)}


def test_pagewire_is_measured_against_the_better_peer_and_the_gaps_of_both() -> None:
    bars, untold = figures.judge(medians(ours=(350.0, 50.0), vllm=(200.0, 40.0), llama=(180.0, 60.0)), [8])
    assert [(bar.name, round(bar.measured, 3), bar.is_met) for bar in bars] == [
        ("pagewire bf16 / vllm bf16 at 8", 1.75, True),
        ("p99 ITL of pagewire bf16 / vllm bf16 at 8", 1.25, False),
        ("p99 ITL of pagewire bf16 / llama BF16 at 8", 0.833, True),
    ]
    assert not untold


def test_a_goal_without_its_rival_cannot_be_met() -> None:
    bars, untold = figures.judge(medians(ours=(350.0, 50.0), vllm=(200.0, 40.0)), [8, 64])
    assert not bars
    assert untold[0] == "pagewire bf16 against vllm bf16 and llama BF16 at 8: no llama BF16"
    assert len(untold) == 3, "and both goals at 64"


def test_what_does_not_run_is_named_once_and_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    absent = [c for c in contenders(Path("/nowhere"), Path("/nowhere"), Path("/nowhere")) if c.name == figures.LLAMA]
    found = Report("peers")
    assert run_rounds(absent, [1], 2, found) == {}
    assert found.untold == [
        "llama BF16: /nowhere/llama/bin/llama-server is missing: run benchmarks/peers/setup.sh llama"
    ]
    assert found.finish(None) == 1
    assert capsys.readouterr().out.count("NOT MEASURED") == 1


def test_a_server_that_ends_while_starting_says_why() -> None:
    with pytest.raises(NotThere, match="no such model"), child(["bash", "-c", "echo no such model; exit 3"], {}):
        pass


def test_a_run_that_is_terminated_takes_its_server_with_it(tmp_path: Path) -> None:
    """A server that outlived its benchmark took a core from whatever was measured next."""
    pid_file = tmp_path / "pid"
    script = f"""
from benchmarks.peers.servers import child
from benchmarks.termination import exit_on_sigterm
exit_on_sigterm()
with child(["bash", "-c", "echo $$ > {pid_file}; sleep 100 & wait"], {{}}):
    pass
"""
    run = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())
        server = psutil.Process(int(pid_file.read_text()))
        sleeper = wait_until(server.children)[0]
        run.terminate()
        assert run.wait(20) == 128 + signal.SIGTERM
    finally:
        run.kill()
    assert wait_until(lambda: has_ended(server) and has_ended(sleeper))


def has_ended(process: psutil.Process) -> bool:
    """Gone, or dead and waiting for an init that collects nothing."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_contenders_cover_the_goals() -> None:
    names = {c.name for c in contenders(Path(), Path(), Path())}
    assert {name for goal in figures.GOALS for name in (goal.ours, *goal.rivals)} <= names


def test_the_limit_is_bandwidth_for_one_stream_and_arithmetic_for_many() -> None:
    """SmolLM2-135M on the machine that the goals were calibrated on: 120 tokens/s at 1, 750 at 64."""
    size = ModelSize(num_body=106_168_320, num_head=28_311_552)
    machine = Machine(read_bytes_per_s=32.5e9, bf16_flop_per_s=466e9, int8_op_per_s=938e9)
    load = Load(num_prompt=105, num_output=64)
    assert size.op_per_output(load) == pytest.approx(0.615e9, rel=0.01)
    assert size.tokens_per_s(machine, load, 1, bits=16, is_integer=False) == pytest.approx(120.8, rel=0.01)
    assert size.tokens_per_s(machine, load, 64, bits=16, is_integer=False) == pytest.approx(758, rel=0.01)
    assert size.tokens_per_s(machine, load, 64, bits=8, is_integer=True) == pytest.approx(1525, rel=0.01)


def test_the_size_of_a_model_is_read_from_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,'
        ' "num_hidden_layers": 30, "vocab_size": 49152}'
    )
    assert ModelSize.read(tmp_path) == ModelSize(num_body=106_168_320, num_head=28_311_552)


def test_instruction_sets_are_told_best_first(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n\nprocessor : 1\nflags : fpu\n")
    assert instruction_sets(cpuinfo) == ("AVX512-VNNI", "AVX-512", "AVX2")
    assert instruction_sets(tmp_path / "absent") == ()


def test_the_plot_is_written(tmp_path: Path) -> None:
    write_plot(medians(ours=(350.0, 50.0), vllm=(200.0, 40.0)), [8, 64], tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes()[1:4] == b"PNG"


def test_setup_refuses_a_peer_that_it_does_not_know(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(SETUP), "vllm", "tgi"], env={"PEERS": str(tmp_path / "peers")}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "tgi" in done.stderr) == (2, True)
    assert not (tmp_path / "peers").exists(), "nothing is installed before every name is known"
