"""What each part may load: contracts that import-linter cannot express, and its static ones observed at run time."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernels", "services", "shared")

CORE = ROOT / "services/scheduler/core"
CORE_MAY_IMPORT = (  # beside the standard library
    "msgspec",  # what messages are made of; the snapshot is one
    "services.scheduler.core",
    "shared.capacity",  # arithmetic on sampling parameters that the gateway does as well
    "shared.errors",
    "shared.messages",
    "shared.packing",
    "shared.sampling",
)
IMPURE = frozenset(  # standard modules that hold a clock, chance, I/O or a log
    [
        "asyncio",
        "concurrent",
        "datetime",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "secrets",
        "select",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "uuid",
        "warnings",
    ]
)

_IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(json.dumps({"imported": names, "loaded": sorted({m.partition(".")[0] for m in sys.modules})}))
"""


def _load_all_of(package: str) -> tuple[list[str], set[str]]:
    """Import every submodule in a fresh interpreter: their names, and all top-level packages that this loaded."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT_EVERYTHING, package], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["imported"], set(answer["loaded"])


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports equal paths, so none is relative"
            yield node.module or ""


@pytest.mark.parametrize("package", ["services.gateway", "services.scheduler", "shared"])
def test_loads_no_torch(package: str) -> None:
    imported, loaded = _load_all_of(package)
    assert len(imported) >= 5, "the walk found next to nothing, so this test would prove nothing"
    assert loaded.isdisjoint({"torch", "transformers", "accelerate", "gguf", "triton"})


def test_a_service_loads_no_other_service() -> None:
    for service in ("gateway", "scheduler", "gpu_worker"):
        code = f"import services.{service}.__main__, sys; print('\\n'.join(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        loaded = {name.split(".")[1] for name in done.stdout.split() if name.startswith("services.")}
        assert loaded == {service}


def test_scheduler_core_imports_only_the_standard_library_and_messages() -> None:
    files = sorted(CORE.rglob("*.py"))
    assert len(files) >= 3
    for file in files:
        for name in _imports(file):
            top = name.partition(".")[0]
            allowed = name.startswith(CORE_MAY_IMPORT) or (top in sys.stdlib_module_names and top not in IMPURE)
            assert allowed, f"{file.relative_to(ROOT)} imports {name}"


def test_kernels_package_is_empty_and_transformers_loads_beside_it() -> None:
    """Transformers probes for an installed package named `kernels`; ours must not make it believe in the other one."""
    assert (ROOT / "kernels/__init__.py").read_text() == ""
    code = "import transformers, kernels; from transformers import LlamaForCausalLM; print(kernels.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "kernels/__init__.py"


def test_every_folder_with_code_is_a_package() -> None:
    """Else setuptools would leave it out of the distribution."""
    folders = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_no_module_is_named_after_nothing() -> None:
    names = {file.stem for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert names.isdisjoint({"utils", "util", "helpers", "common", "misc"})
