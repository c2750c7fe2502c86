"""The process's edges: what it reads, and what it must not load."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from services.gateway.settings import Settings


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_MODEL", "/models/some-model")
    monkeypatch.setenv("PAGEWIRE_CORS_ORIGINS", "https://a.example, https://b.example")
    settings = Settings()
    assert settings.model_names == ("some-model",)
    assert settings.cors_origins == ("https://a.example", "https://b.example")
    monkeypatch.setenv("PAGEWIRE_SERVED_MODEL_NAME", "one,two")
    assert Settings().model_names == ("one", "two")


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValidationError):
        Settings(model=Path("m"), port=-1)
    with pytest.raises(ValidationError):
        Settings(model=Path("m"), metrics_prefix="9 lives")


def test_no_module_of_the_gateway_loads_torch() -> None:
    code = """
import importlib, pkgutil, sys
import services.gateway
for module in pkgutil.walk_packages(services.gateway.__path__, "services.gateway."):
    importlib.import_module(module.name)
assert "services.gateway.http.routes" in sys.modules
print([name for name in ("torch", "transformers", "numpy", "services.scheduler", "kernels") if name in sys.modules])
"""
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
