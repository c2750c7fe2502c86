"""A Triton launch as a value: run on a GPU or in the interpreter, or compiled for a GPU that is not there.

Launch functions (`kernels/*/triton.py`) decide grid, tiles and warps from their tensors alone. So what
`make kernels-report` compiles is what serving launches, not a copy of it.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with everything that it needs."""

    kernel: Any
    """Decorated by `triton.jit`."""
    grid: tuple[int, ...]
    arguments: Mapping[str, object]
    """Tensors and numbers, by the kernel's parameter names."""
    constants: Mapping[str, object]
    """Its `constexpr` parameters."""
    num_warps: int = 4
    num_stages: int = 1

    @property
    def options(self) -> dict[str, int | bool]:
        """For the compiler. Whether a product and a sum become one instruction is part of the numerics, and the default
        differs between versions of Triton: so it is said."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Queue it on the current stream; an empty grid is no launch."""
        if min(self.grid) > 0:
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor go to the Triton kernels: on a GPU, unless Triton is missing there."""
    return tensor.device.type == "cuda" and _has_triton()


def triton_version() -> str | None:
    """`triton-` and the version, if the kernels run by it."""
    return f"triton-{importlib.import_module('triton').__version__}" if _has_triton() else None


def stores_fp8(device: torch.device) -> bool:
    """Whether operations on this GPU read and write float8_e4m3fn: torch's do everywhere."""
    if not _has_triton():
        return True
    with torch.cuda.device(device):
        return compiles_fp8(importlib.import_module("triton").runtime.driver.active.get_current_target())


def compiles_fp8(target: Any) -> bool:
    """Whether Triton has float8_e4m3fn on a `triton.backends.compiler.GPUTarget`: NVIDIA from 8.9 on, AMD."""
    backend = importlib.import_module("triton.compiler.compiler").make_backend(target)
    return "fp8e4nv" in backend.parse_options({"enable_fp_fusion": True}).supported_fp8_dtypes


@functools.cache
def _has_triton() -> bool:
    if importlib.util.find_spec("triton") is None:
        problem = "Triton is not installed"
    elif importlib.import_module("triton").knobs.runtime.interpret:
        problem = "TRITON_INTERPRET is set"
    else:
        return True
    log.warning("%s: the GPU runs the torch reference of every kernel, which is slow", problem)
    return False


def whole_heads(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim] with the heads of a token contiguous, copied only if they are not."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; Triton's tiles have such sides."""
    return 1 << max(0, n - 1).bit_length()
