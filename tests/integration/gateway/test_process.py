"""`python -m services.gateway` as a process: it starts from its environment and ends in order."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from services.cli.ports import free_port
from shared.keys import Keys
from shared.leases import read_members
from shared.messages import Abort
from tests.fakes.byte_model import answer, spell
from tests.fakes.scripted_pool import Script, ScriptedPool
from tests.fakes.sse_reader import SseStream, parse_sse

ROOT = Path(__file__).parents[3]


@contextmanager
def gateway_process(
    model: Path, redis_url: str, *, flags: Sequence[str] = (), **settings: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway and its address; `flags` are Python's."""
    port = settings.setdefault("port", str(free_port()))
    environment = {f"PAGEWIRE_{name.upper()}": value for name, value in settings.items()}
    environment |= {"PAGEWIRE_MODEL": str(model), "PAGEWIRE_REDIS_URL": redis_url}
    environment |= {"PAGEWIRE_POOL": "test", "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *flags, "-m", "services.gateway"], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def wait_ready(url: str) -> None:
    for _ in range(400):
        try:
            if httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("not ready")


def read_stream(url: str, into: list[SseStream]) -> threading.Thread:
    def read() -> None:
        lines: list[str] = []
        body = {"prompt": "go", "stream": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30, trust_env=False) as response:
                lines.extend(response.iter_lines())
        except httpx.RemoteProtocolError:
            pass
        into.append(parse_sse(lines))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_sigterm_lets_streams_finish_and_exits_with_0(byte_model: Path, redis_url: str, keys: Keys) -> None:
    script = answer("to the very end", hold_after=4)
    with (
        ScriptedPool(redis_url, keys, lambda s: script) as pool,
        gateway_process(byte_model, redis_url, drain_delay_s="0.5") as (process, url),
    ):
        wait_ready(url)
        result: list[SseStream] = []
        thread = read_stream(url, result)
        pool.wait_for(lambda: pool.submissions)
        process.send_signal(signal.SIGTERM)
        reason = ""
        while reason != "shutting_down":  # not ready first, while connections are still accepted
            reason = httpx.get(f"{url}/health/ready", trust_env=False).json().get("reason", "")
        pool.release()
        thread.join(20)
        assert result[0].is_done and result[0].text() == "to the very end"
        assert process.wait(20) == 0
        assert "Traceback" not in (process.stderr.read() if process.stderr else "")


def test_streams_beyond_the_grace_period_are_cut_and_may_go_on_elsewhere(
    byte_model: Path, redis_url: str, keys: Keys
) -> None:
    with (
        ScriptedPool(redis_url, keys, lambda s: Script(spell("x"), end=None)) as pool,
        gateway_process(byte_model, redis_url, shutdown_grace_s="0.5") as (process, url),
    ):
        wait_ready(url)
        result: list[SseStream] = []
        thread = read_stream(url, result)
        pool.wait_for(lambda: pool.submissions)
        process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert result[0].chunks[-1]["error"]["code"] == "shutting_down"
        assert process.wait(20) == 0
        assert pool.messages(Abort) == []
        assert pool.client.zcard(keys.windows) == 1  # until its window is over


def test_a_second_sigterm_ends_at_once(byte_model: Path, redis_url: str, keys: Keys) -> None:
    """Case 98. The stream would go on for the whole grace period; it may go on elsewhere, and Redis is told so."""
    with (
        ScriptedPool(redis_url, keys, lambda s: Script(spell("x"), end=None)) as pool,
        gateway_process(byte_model, redis_url, shutdown_grace_s="60") as (process, url),
    ):
        wait_ready(url)
        result: list[SseStream] = []
        thread = read_stream(url, result)
        pool.wait_for(lambda: pool.submissions)
        process.send_signal(signal.SIGTERM)
        with suppress(httpx.ConnectError):  # it takes no more connections
            while httpx.get(f"{url}/health/ready", trust_env=False).json().get("reason") != "shutting_down":
                time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        thread.join(20)
        assert result[0].chunks[-1]["error"]["code"] == "shutting_down"
        assert not result[0].is_done and pool.messages(Abort) == []
        assert not any(name.startswith("gateway") for name, lease in read_members(pool.client, keys).items() if lease)
        log = process.stderr.read() if process.stderr else ""
        assert "draining" in log and "could not be sent" not in log and "Traceback" not in log


def test_a_bad_model_folder_is_one_clear_line(tmp_path: Path, redis_url: str) -> None:
    with gateway_process(tmp_path, redis_url) as (process, _):
        assert process.wait(30) == 2
        output = process.stderr.read() if process.stderr else ""
        assert "tokenizer.json" in output and "Traceback" not in output
