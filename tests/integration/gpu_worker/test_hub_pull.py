"""Pulling from a hub: a loopback server that speaks the few calls of the hub's API, real client code against it."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.cli.ports import free_port

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"w" * 100_000,
    "tokenizer.json": b"{}",
    "modeling_evil.py": b"raise SystemExit('code of a model ran')",
    "pytorch_model.bin": b"pickle",
    "onnx/model.safetensors": b"other format",
}


def digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    """`org/tiny` has FILES, `org/pickled` has no safetensors, everything else is absent."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
            entries = [{"type": "file", "path": n, "size": len(d), "oid": digest(d)} for n, d in FILES.items()]
            self._answer(200, json.dumps(entries).encode())
        elif path.startswith(("/api/models/org/tiny", "/api/models/org/pickled")):
            names = FILES if "tiny" in path else {"pytorch_model.bin": b"pickle"}
            siblings = [{"rfilename": name, "size": len(data)} for name, data in names.items()]
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            self._answer(200, json.dumps(info).encode())
        elif path.startswith("/org/tiny/resolve/"):
            self._answer(200, FILES[path.partition(f"/resolve/{COMMIT}/")[2]])
        else:
            self._answer(404, b'{"error": "no such model"}', {"X-Error-Code": "RepoNotFound"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{digest(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def pull(name: str, home: Path, endpoint: str, **extra: str) -> "subprocess.CompletedProcess[str]":
    """One pull by its command line; an empty proxy list keeps loopback on loopback."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "no_proxy": "*"} | extra
    environment.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in extra else None
    command = [sys.executable, "-m", "services.gpu_worker.weights", "pull", name, "--home", str(home)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_takes_weights_and_tokenizer_but_never_code(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    """Case 135."""
    done = pull("org/tiny", tmp_path, url(hub))
    assert done.returncode == 0, done.stderr
    target = tmp_path / "models" / "hub" / "org--tiny"
    assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (target / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["stage"], last["detail"]) == ("ready", str(target))
    asked = len(hub.asked)  # type: ignore[attr-defined]
    again = pull("org/tiny", tmp_path, url(hub))
    assert again.returncode == 0
    assert len(hub.asked) == asked, "a model in the cache needs no network"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "reason"), [("org/absent", "RepositoryNotFound"), ("org/pickled", "no safetensors")])
def test_model_that_cannot_be_served_is_named(hub: ThreadingHTTPServer, tmp_path: Path, name: str, reason: str) -> None:
    done = pull(name, tmp_path, url(hub))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert name in done.stderr
    assert reason in done.stderr
    assert not (tmp_path / "models" / "hub" / name.replace("/", "--")).exists()


def test_no_connection_fails_at_once_and_clearly(tmp_path: Path) -> None:
    started = time.monotonic()
    done = pull("org/tiny", tmp_path, f"http://127.0.0.1:{free_port()}")
    assert time.monotonic() - started < 15
    assert done.returncode == 2
    assert "'org/tiny' is not in the cache and the hub cannot give it" in done.stderr
    assert "folder with safetensors" in done.stderr


def test_hub_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        done = pull("org/tiny", tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert done.returncode == 2
    assert 4 < time.monotonic() - started < 25


def test_offline_mode_is_respected(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    done = pull("org/tiny", tmp_path, url(hub), HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "OfflineMode" in done.stderr
    assert hub.asked == []  # type: ignore[attr-defined]
