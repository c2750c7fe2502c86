"""Products with a packed weight by the C++ kernels: linear.cpp computes, weight.h describes the packed form.

A weight in float32 whose numbers are all bfloat16 is packed as bfloat16: half the memory to read and the same results
bit for bit, since it is widened before it is multiplied.
"""

import ctypes
from typing import NamedTuple

import torch

from kernels.checks import require
from kernels.native.library import Float, Int, Library, Pointer
from kernels.native.memory import allocate

_FLOAT32, _BFLOAT16 = 0, 1


class PackedWeight(ctypes.Structure):
    """As in weight.h."""

    _fields_ = (
        ("panels", Pointer),
        ("out_features", Int),
        ("in_features", Int),
        ("kind", Int),
        ("is_gated", Int),
    )


class LinearInput(ctypes.Structure):
    """As in linear.h."""

    _fields_ = (("data", Pointer), ("rows", Int), ("stride", Int), ("is_bf16", Int))


class LinearOutput(ctypes.Structure):
    """As in linear.h."""

    _fields_ = (
        ("data", Pointer),
        ("stride", Int),
        ("is_bf16", Int),
        ("bias", Pointer),
        ("residual", Pointer),
        ("activation", Int),
        ("soft_cap", Float),
    )


class Packed(NamedTuple):
    """A packed weight and the memory that it points to."""

    weight: PackedWeight
    memory: torch.Tensor


def pack(library: Library, weight: torch.Tensor, *, is_gated: bool = False) -> Packed:
    """Pack `weight` [out_features, in_features] for the panels of `library`.

    Args:
        is_gated: the first half of the outputs is the gate of the second half.
    """
    stored = _in_smallest_form(weight)
    group = 4 // stored.itemsize
    panel = int(library.function("pw_linear_panel", result=Int)())
    parts = 2 if is_gated else 1
    columns, in_features = stored.shape[0] // parts, stored.shape[1]
    padded = _round_up(columns, panel), _round_up(in_features, group)
    memory = allocate(parts * padded[0] * padded[1] * stored.itemsize)
    # [parts, panels, panel, words, group] of the weight become [panels, parts, words, panel, group] in memory.
    panels = memory.view(stored.dtype).view(padded[0] // panel, parts, padded[1] // group, panel, group)
    source = stored.view(parts, columns, in_features)
    if padded != (columns, in_features):
        source = torch.nn.functional.pad(source, (0, padded[1] - in_features, 0, padded[0] - columns))
    panels.copy_(source.view(parts, -1, panel, padded[1] // group, group).permute(1, 0, 3, 2, 4))
    kind = _BFLOAT16 if stored.dtype == torch.bfloat16 else _FLOAT32
    return Packed(PackedWeight(memory.data_ptr(), stored.shape[0], padded[1], kind, is_gated), memory)


class NativeLinear:
    """`x @ weight.T + bias`; x and the result in float32 or bfloat16."""

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = pack(library, weight)
        self._bias = None if bias is None else bias.float().contiguous()
        self._call = library.function("pw_linear", Pointer, Pointer, Pointer)
        self._takes_bf16 = library.takes_bfloat16
        kind = "bf16" if self._packed.weight.kind == _BFLOAT16 else "f32"
        self.name = f"{library.level.name}-{kind}"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        fits = x.dim() == 2 and x.shape[1] == self.in_features and x.dtype in (torch.float32, torch.bfloat16)
        require(fits, f"linear: x {tuple(x.shape)} {x.dtype}, weight takes {self.in_features} inputs")
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype)
        x = self._readable(x)
        bias = None if self._bias is None else self._bias.data_ptr()
        self._call(
            ctypes.byref(self._packed.weight),
            ctypes.byref(LinearInput(x.data_ptr(), x.shape[0], x.stride(0), x.dtype == torch.bfloat16)),
            ctypes.byref(LinearOutput(out.data_ptr(), out.stride(0), out.dtype == torch.bfloat16, bias, None, 0, 0.0)),
        )
        return out

    def _readable(self, x: torch.Tensor) -> torch.Tensor:
        """`x` as the kernel takes it: as wide as the packed weight, its last dimension contiguous."""
        is_pair_product = self._takes_bf16 and self._packed.weight.kind == _BFLOAT16
        if x.dtype == torch.bfloat16 and not is_pair_product:
            x = x.float()
        missing = self._packed.weight.in_features - x.shape[1]
        if missing:
            return torch.nn.functional.pad(x, (0, missing))
        return x if x.stride(1) == 1 else x.contiguous()


def _in_smallest_form(weight: torch.Tensor) -> torch.Tensor:
    narrow = weight.bfloat16()
    return narrow if weight.dtype == torch.bfloat16 or torch.equal(narrow.float(), weight) else weight.contiguous()


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
