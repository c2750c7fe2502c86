"""What `pagewire serve` makes of one service."""

import json
import socket
from pathlib import Path

import pytest

from services.cli.serve import program
from services.cli.settings import Settings, load_settings
from services.gpu_worker.settings import Settings as WorkerSettings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("PAGEWIRE_NAME", raising=False)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "model.safetensors").touch()
    return load_settings({"model": str(tmp_path), "workers": 2})


def name_of(settings: Settings, service: str, name: str | None = None, index: int = 0) -> str:
    return program(settings, service, "redis://127.0.0.1:1/0", name, index)[2]["PAGEWIRE_NAME"]


def test_services_of_two_machines_have_two_names(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers were worker-0: the second one was never admitted."""
    names = []
    for host in ("node-a", "node-b"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        names += [name_of(settings, "gpu_worker"), name_of(settings, "gpu_worker", index=1)]
        names += [name_of(settings, "scheduler"), name_of(settings, "gateway")]
    assert names[:4] == ["worker-node-a-0", "worker-node-a-1", "scheduler-node-a-0", "gateway-node-a-0"]
    assert len(set(names)) == 8


def test_a_machine_may_be_called_anything(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Büro 3/" + "x" * 200)
    assert WorkerSettings(name=name_of(settings, "gpu_worker")).name.startswith("worker-B-ro-3-xxx")


def test_a_given_name_wins(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_NAME", "of-the-environment")
    assert name_of(settings, "gpu_worker") == "of-the-environment"
    assert name_of(settings, "gpu_worker", "of-a-flag") == "of-a-flag"
