"""Dispatch levels: what the C++ kernels are compiled for, and which of it this CPU can run."""

import platform
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c", "-mprefer-vector-width=512")
_AVX512_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"})


@dataclass(frozen=True, slots=True)
class Level:
    """One build of the kernels."""

    name: str
    machine: str
    """As `platform.machine()` says it."""
    cpu_flags: frozenset[str]
    """What the CPU must have, as Linux names it."""
    compiler_flags: tuple[str, ...]


LEVELS: tuple[Level, ...] = (
    Level(
        "avx512_bf16",
        "x86_64",
        _AVX512_FLAGS | {"avx512_vnni", "avx512_bf16"},
        (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    ),
    Level("avx512_vnni", "x86_64", _AVX512_FLAGS | {"avx512_vnni"}, (*_AVX512, "-mavx512vnni")),
    Level("avx512", "x86_64", _AVX512_FLAGS, _AVX512),
    Level("avx2", "x86_64", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")),
    Level("neon", "aarch64", frozenset(), ()),
)
"""Best first. Skylake has AVX-512 without VNNI; Ice Lake has both; Cooper Lake, Sapphire Rapids and Zen 4 have all."""


def machine_levels(machine: str | None = None) -> tuple[Level, ...]:
    """Levels of an instruction set architecture, by default of this machine's."""
    name = machine or platform.machine()
    name = {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)
    return tuple(level for level in LEVELS if level.machine == name)


def usable_levels() -> tuple[Level, ...]:
    """Levels that this CPU runs, best first."""
    flags = _cpu_flags()
    return tuple(level for level in machine_levels() if level.cpu_flags <= flags)


def _cpu_flags() -> frozenset[str]:
    """Flags of the first core; empty where the system does not tell."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
