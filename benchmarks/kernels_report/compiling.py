"""Compiles a launch for a GPU that is not there, and reads what it needs from the binary."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError

from benchmarks.kernels_report.cases import all_cases
from kernels.launch import Launch

TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
}
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Resources:
    """What a program of the kernel takes."""

    registers: int
    """Per thread."""
    shared_bytes: int
    spilled: int
    """NVIDIA: bytes of stack per thread, which these kernels use for nothing but spills. AMD: spilled registers."""


def compile_case(name: str, target: str) -> Resources | None:
    """Of the case of that name; None where the target has no such type."""
    launch = next(case.launch for case in all_cases() if case.name == name)
    try:
        return compiled(launch, TARGETS[target])
    except CompilationError as error:
        if "fp8e4nv not supported" in str(error):
            return None
        raise


def compiled(launch: Launch, target: GPUTarget) -> Resources:
    """Compile as Triton would at the launch: pointers and numbers specialised alike."""
    names = launch.kernel.arg_names
    signature, constants, attributes = {}, dict(launch.constants), {}
    for place, name in enumerate(names):
        value = launch.arguments.get(name)
        if name in constants or value is None or (type(value) is int and value == 1):
            signature[name] = "constexpr"
            constants.setdefault(name, value)
            continue
        signature[name] = _type_of(value)
        if _is_aligned(value):
            attributes[(place,)] = [["tt.divisibility", _ALIGNED]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    binary = triton.compile(source, target=target, options=launch.options)
    read = _read_nvidia if target.backend == "cuda" else _read_amd
    return read(binary.asm, binary.metadata.shared)


def _type_of(value: object) -> str:
    match value:
        case torch.Tensor():
            return "*" + _TYPES[value.dtype]
        case float():
            return "fp32"
        case int():
            return "i32" if -(2**31) <= value < 2**31 else "i64"
    raise TypeError(f"a kernel takes no {type(value).__name__}")


def _is_aligned(value: object) -> bool:
    """Tensors come from an allocator that aligns them."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % _ALIGNED == 0)


def _read_nvidia(asm: Mapping[str, Any], shared_bytes: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Resources(
        _number(r"REG:(\d+)", text), shared_bytes, _number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text)
    )


def _read_amd(asm: Mapping[str, Any], shared_bytes: int) -> Resources:
    text = asm["amdgcn"]
    spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", text) + _number(r"\.sgpr_spill_count:\s*(\d+)", text)
    return Resources(_number(r"\.vgpr_count:\s*(\d+)", text), shared_bytes, spilled)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in what the compiler's tools print:\n{text[:2000]}")
    return int(found[1])
