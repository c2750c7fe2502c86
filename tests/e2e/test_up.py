"""`pagewire up` and its companions, as a newcomer uses them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from services.cli.ports import free_port
from tests.harness.fixtures import StartStack
from tests.harness.stack import Stack

pytestmark = [pytest.mark.model]


def pagewire(*arguments: str, timeout: float = 60.0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def all_gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_the_openai_client_lists_models_and_streams_a_chat(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [stack.model]
        chunks = client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": "Name a colour."}],
            max_tokens=16,
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip()


def test_ps_lists_one_live_process_per_service(stack: Stack) -> None:
    pids = stack.pids()
    assert {service: len(numbers) for service, numbers in pids.items()} == {
        "gateway": 1,
        "scheduler": 1,
        "gpu_worker": 1,
        "redis": 1,
    }
    for service in ("gateway", "scheduler", "gpu_worker"):
        assert f"services.{service}" in psutil.Process(pids[service][0]).cmdline()


def test_no_collection_visits_what_start_up_made(stack: Stack) -> None:
    for name, said in {
        "gateway-0": "objects frozen",
        "scheduler-0": "start_up_frozen",
        "worker-0": "objects frozen",
    }.items():
        assert said in (stack.state_dir / "logs" / f"{name}.log").read_text(), name


def test_what_its_own_redis_loses_in_a_crash_is_told_at_the_start(stack: Stack) -> None:
    told = (stack.state_dir.parent / "up.log").read_text()
    assert "Redis: durability everysec, a crash loses at most the last second" in told and "warning: Redis" not in told


def test_several_gateways_share_a_port_and_have_their_own(float_stack: Stack) -> None:
    shown = json.loads(pagewire("ps", "--json", "--state-dir", str(float_stack.state_dir)).stdout)
    urls = shown["gateway_urls"]
    assert sorted(urls) == ["gateway-0", "gateway-1"] and len(shown["gateway"]) == 2
    assert len({*urls.values(), float_stack.url}) == 3
    for url in (*urls.values(), float_stack.url):
        assert httpx.get(f"{url}/health/ready").status_code == 200
    served: list[float] = []
    for _ in range(64):  # each a connection of its own: the kernel divides them
        body = {"model": float_stack.model, "prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{float_stack.url}/v1/completions", json=body, timeout=30).status_code == 200
        served = [metric(url, "pagewire:request_success_total") for url in urls.values()]
        if all(served):
            break
    assert served and all(served)


def metric(url: str, name: str) -> float:
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_no_secret_is_seen_by_other_users(stack: Stack) -> None:
    password = stack.redis_url.partition("://:")[2].partition("@")[0]
    assert len(password) >= 32
    pids = [pid for numbers in stack.pids().values() for pid in numbers]
    assert not any(password in part for pid in pids for part in psutil.Process(pid).cmdline())
    readable = [path for path in stack.state_dir.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert not [path for path in readable if password.encode() in path.read_bytes()]


def test_a_second_stack_on_the_same_state_directory_is_refused(stack: Stack) -> None:
    done = pagewire("up", "--port", str(free_port()), "--state-dir", str(stack.state_dir))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: another pagewire (pid {stack.process.pid}, {stack.url}) uses")
    assert httpx.get(f"{stack.url}/health").status_code == 200


def test_chat_and_bench_find_the_running_server(stack: Stack) -> None:
    asked = pagewire("chat", "Say hello.", "--max-tokens", "8", "--state-dir", str(stack.state_dir))
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip()
    options = ["--requests", "4", "--concurrency", "2", "--output-tokens", "8", "--prompt-words", "5"]
    measured = pagewire("bench", "--json", "--state-dir", str(stack.state_dir), *options)
    assert measured.returncode == 0, measured.stdout
    report = json.loads(measured.stdout)
    assert (report["completed"], report["output_tokens"]) == (4, 32)


def test_a_second_gateway_joins_by_serve(stack: Stack, tmp_path: Path) -> None:
    port, said = free_port(), tmp_path / "said"
    command = [sys.executable, "-m", "services.cli", "serve", "gateway", "--name", "gateway-1", "--port", str(port)]
    with (
        said.open("wb") as error,
        subprocess.Popen([*command, "--state-dir", str(stack.state_dir)], stderr=error) as process,
    ):
        try:
            deadline = time.monotonic() + 30
            while not _is_ready(port):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            body = {"model": stack.model, "prompt": "One two", "max_tokens": 4}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)
            assert answer.json()["usage"]["completion_tokens"] >= 1
        finally:
            process.terminate()
    told = said.read_text()
    assert "Redis: durability everysec" in told and f"listening on http://127.0.0.1:{port}" in told


def _is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def test_killed_processes_come_back_and_serve(stack: Stack) -> None:
    """BEST-02."""
    before = stack.pids()
    for service in ("gateway", "redis"):
        os.kill(before[service][0], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            body = {"model": stack.model, "prompt": "One two", "max_tokens": 4}
            if httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, (stack.state_dir / "logs" / "gateway-0.log").read_text()[-2000:]
        time.sleep(0.2)
    after = stack.pids()
    assert after["gateway"] != before["gateway"]
    assert after["redis"] != before["redis"]
    assert (after["scheduler"], after["gpu_worker"]) == (before["scheduler"], before["gpu_worker"])


def test_ctrl_c_leaves_no_process(start_stack: StartStack, tmp_path: Path) -> None:
    """With options from a config file, which flags override."""
    config = tmp_path / "pagewire.toml"
    config.write_text('served_model_name = "from-file"\nmax_num_seqs = 4\nmax-model-len = 512\n')
    with start_stack(config=config, max_num_seqs=8) as stack:
        assert stack.model == "from-file"
        pids = [pid for numbers in stack.pids().values() for pid in numbers]
        environment = psutil.Process(stack.pids()["scheduler"][0]).environ()
        assert (environment["PAGEWIRE_MAX_NUM_SEQS"], environment["PAGEWIRE_MAX_MODEL_LEN"]) == ("8", "512")
        started = time.monotonic()
        assert stack.stop() == 0
        assert time.monotonic() - started < 10
        assert all_gone(pids, 0.5)
        assert stack.pids() == {"gateway": [], "scheduler": [], "gpu_worker": [], "redis": []}


def test_kill_9_of_the_supervisor_leaves_no_process(start_stack: StartStack) -> None:
    with pytest.raises(AssertionError), start_stack() as stack:
        pids = [pid for numbers in stack.pids().values() for pid in numbers]
        stack.process.kill()
        stack.process.wait()
        # Leaving the block asserts an orderly end, which this is not.
    assert len(pids) == 4
    assert all_gone(pids, 3.0)
    assert stack.pids() == {"gateway": [], "scheduler": [], "gpu_worker": [], "redis": []}


def test_a_port_in_use_starts_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = pagewire("up", "--port", str(port), "--state-dir", str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    assert not list((tmp_path / "logs").iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "no-such-model"], "error: model 'no-such-model'"),
        (["--workers", "0"], "error: option workers"),
        (["--host", "0.0.0.0"], "error: host 0.0.0.0 can be reached by others: give --api-key"),
        (["--api-key", "short"], "error: api-key: at least 8"),
        (["--redis-url", "redis://127.0.0.1:1/0"], "error: Redis at redis://127.0.0.1:1/0"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path: Path, flags: list[str], message: str) -> None:
    done = pagewire("up", "--port", str(free_port()), "--state-dir", str(tmp_path), *flags)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def test_a_child_that_cannot_start_ends_everything(tmp_path: Path) -> None:
    """A worker that is told a block count no memory holds; its own words are the error."""
    flags = ["--port", str(free_port()), "--state-dir", str(tmp_path), "--num-blocks", "67000000"]
    done = pagewire("up", *flags, timeout=120)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "error: worker-0 " in done.stderr.splitlines()[-1]
    state_dir = str(tmp_path)
    assert not [p for p in psutil.process_iter(["cmdline"]) if state_dir in " ".join(p.info["cmdline"] or [])]
