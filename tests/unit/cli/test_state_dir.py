"""The lock and the record of what runs."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.cli.state_dir import ChildState, RunState, StateDir, process_start_time
from shared.errors import ConfigError


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDir:
    state_dir = StateDir(tmp_path / "state")
    state_dir.create()
    return state_dir


def run_state(*children: ChildState) -> RunState:
    return RunState(7, "http://0.0.0.0:1", "http://127.0.0.1:1", "unix://:secret@/s", "default", "tiny", children)


def test_only_one_holds_the_lock(state_dir: StateDir) -> None:
    assert not state_dir.is_locked()
    state_dir.write(run_state())
    with state_dir.lock():
        assert state_dir.is_locked()
        with (
            pytest.raises(ConfigError, match=r"another pagewire \(pid 7, http://0\.0\.0\.0:1\) uses"),
            state_dir.lock(),
        ):
            pass
    with state_dir.lock():
        pass


def test_addresses_that_a_killed_supervisor_left_are_not_told(state_dir: StateDir) -> None:
    state_dir.write(msgspec.structs.replace(run_state(), gateways={"gateway-0": "http://127.0.0.1:1"}))

    def told() -> dict[str, str]:
        done = CliRunner().invoke(app, ["ps", "--json", "--state-dir", str(state_dir.path)])
        urls: dict[str, str] = json.loads(done.stdout)["gateway_urls"]
        return urls

    assert told() == {}
    with state_dir.lock():
        assert told() == {"gateway-0": "http://127.0.0.1:1"}


def test_the_lock_is_not_inherited_by_children(state_dir: StateDir) -> None:
    with state_dir.lock():
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not state_dir.is_locked()
    finally:
        child.communicate()


def test_everything_is_closed_to_other_users(state_dir: StateDir) -> None:
    state_dir.write(run_state())
    for path in (state_dir.path, state_dir.logs, state_dir.redis, state_dir.state_file):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_live_processes_are_told_from_dead_and_from_later_ones_of_the_same_pid(state_dir: StateDir) -> None:
    assert state_dir.live_pids() == {"gateway": [], "scheduler": [], "gpu_worker": [], "redis": []}
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended_start = process_start_time(ended.pid)
    ended.wait()
    me, now = os.getpid(), process_start_time(os.getpid())
    state_dir.write(
        run_state(
            ChildState("gateway", "gateway-0", me, now),
            ChildState("scheduler", "scheduler-0", me, now - 100),
            ChildState("gpu_worker", "worker-0", ended.pid, ended_start),
        )
    )
    assert state_dir.live_pids() == {"gateway": [me], "scheduler": [], "gpu_worker": [], "redis": []}


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state = ChildState("gateway", "g", child.pid, process_start_time(child.pid))
    assert state.is_alive
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not state.is_alive
    child.wait()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_broken_state_file_is_no_state(state_dir: StateDir, content: bytes) -> None:
    state_dir.state_file.write_bytes(content)
    assert state_dir.read() is None


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="state directory"):
        StateDir(tmp_path / "file" / "state").create()
