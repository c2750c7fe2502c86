"""Fault points in processes of their own: a claimed fault is suffered once, and without a folder there is none."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from shared.fault_points import FaultPoint

_PASS_TWICE = f"""
import sys
from shared.fault_points import FaultPoint, arm, pass_point
arm(sys.argv[1])
pass_point(FaultPoint.{FaultPoint.TICK_DECIDED.name})
print("passed", flush=True)
pass_point(FaultPoint.{FaultPoint.TICK_COMMITTED.name})
"""


def start(folder: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", _PASS_TWICE, folder], stdout=subprocess.PIPE)


def test_the_process_ends_at_the_point_that_was_named(tmp_path: Path) -> None:
    (tmp_path / FaultPoint.TICK_COMMITTED).write_text("SIGKILL\n")
    process = start(str(tmp_path))
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == (b"passed\n", -signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == [f"tick_committed.{process.pid}"]


def test_a_fault_is_suffered_once(tmp_path: Path) -> None:
    (tmp_path / FaultPoint.TICK_DECIDED).write_text("SIGKILL")
    returncodes = []
    for _ in range(2):
        process = start(str(tmp_path))
        process.communicate(timeout=30)
        returncodes.append(process.returncode)
    assert returncodes == [-signal.SIGKILL, 0]


def test_a_paused_process_goes_on(tmp_path: Path) -> None:
    (tmp_path / FaultPoint.TICK_DECIDED).write_text("SIGSTOP")
    process = start(str(tmp_path))
    deadline = time.monotonic() + 30
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == (b"passed\n", 0)


def test_without_a_folder_nothing_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / FaultPoint.TICK_DECIDED).write_text("SIGKILL")
    process = subprocess.Popen([sys.executable, "-c", _PASS_TWICE, ""], cwd=tmp_path, stdout=subprocess.PIPE)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_fault_of_one_request_strikes_all_that_pass_with_it_and_nobody_else(tmp_path: Path) -> None:
    program = _PASS_TWICE.replace("TICK_DECIDED)", "STEP_BEGUN, lambda: sys.argv[2:])")
    (tmp_path / FaultPoint.STEP_BEGUN).write_text("SIGKILL poison")
    returncodes = []
    for requests in (["a", "poison"], ["a"], ["poison"]):
        command = [sys.executable, "-c", program, str(tmp_path), *requests]
        returncodes.append(subprocess.run(command, capture_output=True, timeout=30).returncode)
    assert returncodes == [-signal.SIGKILL, 0, -signal.SIGKILL]
