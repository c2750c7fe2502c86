"""Products with a packed weight by the C++ kernels: linear.cpp computes, weight.h describes the packed form.

A weight in float32 whose numbers are all bfloat16 is packed as bfloat16: half the memory to read and the same results
bit for bit, since it is widened before it is multiplied. A weight in blocks keeps its codes, scales and minima.
"""

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from kernels.checks import require
from kernels.gated.native import Gate
from kernels.linear.blocks import BLOCK, BlockWeight
from kernels.linear.reference import CODE_GROUP, quantize_weight
from kernels.native.library import Float, Int, Library, Pointer
from kernels.native.memory import allocate


class Kind(IntEnum):
    """Of a packed weight."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5


class PackedWeight(ctypes.Structure):
    """As in weight.h."""

    _fields_ = (
        ("panels", Pointer),
        ("scales", Pointer),
        ("out_features", Int),
        ("in_features", Int),
        ("kind", Int),
        ("is_gated", Int),
    )


class _Input(ctypes.Structure):
    _fields_ = (("data", Pointer), ("rows", Int), ("stride", Int), ("is_bf16", Int))


class _Output(ctypes.Structure):
    _fields_ = (
        ("data", Pointer),
        ("stride", Int),
        ("is_bf16", Int),
        ("bias", Pointer),
        ("residual", Pointer),
        ("activation", Int),
        ("soft_cap", Float),
    )


LARGEST = np.dtype([("value", np.float32), ("column", np.int32)])
"""A row's largest number, as in linear.h."""


class Packed(NamedTuple):
    """A packed weight and the memory that it points to."""

    weight: PackedWeight
    panels: torch.Tensor
    scales: torch.Tensor | None


class NativeLinear:
    """`x @ weight.T + bias`, or of a gated weight `activation(first half) * second half`; float32 or bfloat16, as x."""

    def __init__(
        self,
        library: Library,
        weight: torch.Tensor | BlockWeight,
        bias: torch.Tensor | None = None,
        *,
        activation: Gate | None = None,
        is_int8: bool = False,
    ) -> None:
        """`is_int8`: round the weight to int8, with one scale per output feature."""
        self.library = library
        self.in_features = weight.shape[1]
        self.out_features = weight.shape[0] if activation is None else weight.shape[0] // 2
        self.packed = pack(library, weight, is_gated=activation is not None, is_int8=is_int8)
        self.bias = None if bias is None else bias.float().contiguous()
        self.activation = activation or Gate.SILU
        self._run = library.function("pw_linear", Pointer, Pointer, Pointer)
        self._argmax = library.function("pw_linear_argmax", Pointer, Pointer, Float, Pointer)
        self.kind = Kind(self.packed.weight.kind)
        self.name = f"{library.level.name}-{self.kind.name.lower()}"
        self._reads_bf16 = self.kind >= Kind.INT8 or (self.kind is Kind.BF16 and library.takes_bfloat16)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        given = self.readable(x)
        out = torch.empty(len(x), self.out_features, dtype=x.dtype)
        self._run(ctypes.byref(self.packed.weight), ctypes.byref(_input(given)), ctypes.byref(self.output(out)))
        return out

    def output(self, out: torch.Tensor) -> _Output:
        """Where a product goes: `out` [rows, out_features]."""
        bias = None if self.bias is None else self.bias.data_ptr()
        is_bf16 = out.dtype == torch.bfloat16
        return _Output(out.data_ptr(), out.stride(0), is_bf16, bias, None, self.activation, 0.0)

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Column [rows] and value [rows] of each row's largest product, without bias: the first of equal ones; NaN if
        one was. No product is stored."""
        x = self.readable(x)
        largest = np.empty(len(x), LARGEST)
        self._argmax(ctypes.byref(self.packed.weight), ctypes.byref(_input(x)), 0.0, largest.ctypes.data)
        return torch.from_numpy(largest["column"].astype(np.int64)), torch.from_numpy(largest["value"].copy())

    def readable(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, in_features] as the kernel takes it: as wide as the packed weight, its last dimension contiguous.

        Raises:
            ValueError: another shape, or neither float32 nor bfloat16.
        """
        fits = x.dim() == 2 and x.shape[1] == self.in_features and x.dtype in (torch.float32, torch.bfloat16)
        require(fits, f"linear: x {tuple(x.shape)} {x.dtype}, weight takes {self.in_features} inputs")
        if x.dtype == torch.bfloat16 and not self._reads_bf16:
            x = x.float()
        missing = self.packed.weight.in_features - x.shape[1]
        if missing:
            return torch.nn.functional.pad(x, (0, missing))
        return x if x.stride(1) == 1 else x.contiguous()


class LinearSequence:
    """Products in turn by one call, with results in the same memory every time, as a decoder's step makes them."""

    def __init__(self, products: Sequence[tuple[NativeLinear, torch.Tensor]]) -> None:
        """`products`: weights of one library, and what each is multiplied with."""
        self._count = len(products)
        self._inputs = [linear.readable(x) for linear, x in products]
        self._outputs = [
            torch.empty(len(x), linear.out_features, dtype=x.dtype)
            for (linear, _), x in zip(products, self._inputs, strict=True)
        ]
        linears = self._linears = [linear for linear, _ in products]
        """Kept, for their memory is read."""
        outputs = [linear.output(out) for linear, out in zip(linears, self._outputs, strict=True)]
        self._arguments = (
            (PackedWeight * self._count)(*(linear.packed.weight for linear in linears)),
            (_Input * self._count)(*map(_input, self._inputs)),
            (_Output * self._count)(*outputs),
        )
        self._run = linears[0].library.function("pw_linears", Int, Pointer, Pointer, Pointer)

    def __call__(self) -> list[torch.Tensor]:
        """The results, which the next call overwrites."""
        self._run(self._count, *self._arguments)
        return self._outputs


def _input(x: torch.Tensor) -> _Input:
    return _Input(x.data_ptr(), x.shape[0], x.stride(0), x.dtype == torch.bfloat16)


def pack(
    library: Library, weight: torch.Tensor | BlockWeight, *, is_gated: bool = False, is_int8: bool = False
) -> Packed:
    """Pack `weight` [out_features, in_features] for the panels of `library`.

    Args:
        is_gated: the first half of the outputs is the gate of the second half.
        is_int8: round to int8.
    """
    panel, parts = int(library.function("pw_linear_panel", result=Int)()), 2 if is_gated else 1
    # Modulo 256 this adds 128 to codes where the level multiplies unsigned bytes.
    offset = int(library.function("pw_linear_code_offset", result=Int)()) and -128
    kind, scales = Kind.INT8, None
    if isinstance(weight, BlockWeight):
        kind = Kind[weight.form]
        panels, in_features = _block_panels(weight, panel, offset, parts)
    elif is_int8:
        scales, stored = quantize_weight(weight)
        panels, in_features = _to_panels(stored, panel, CODE_GROUP, parts=parts)
        panels.add_(offset)
    else:
        stored = _in_smallest_form(weight)
        kind = Kind.BF16 if stored.dtype == torch.bfloat16 else Kind.F32
        panels, in_features = _to_panels(stored, panel, 4 // stored.itemsize, parts=parts)
    pointers = panels.data_ptr(), None if scales is None else scales.data_ptr()
    return Packed(PackedWeight(*pointers, weight.shape[0], in_features, kind, is_gated), panels, scales)


def _block_panels(weight: BlockWeight, panel: int, offset: int, parts: int) -> tuple[torch.Tensor, int]:
    """Panels as blocks.h lays them out, and the number of inputs rounded up to two blocks."""
    columns, in_features = weight.shape[0] // parts, _round_up(weight.shape[1], 2 * BLOCK)
    rows, pairs = _round_up(columns, panel), in_features // (2 * BLOCK)
    missing = rows - columns, in_features - weight.shape[1]
    codes, factors = (tensor.unflatten(0, (parts, columns)) for tensor in (weight.codes, weight.factors))
    codes = torch.nn.functional.pad(codes, (0, missing[1], 0, missing[0]))
    factors = torch.nn.functional.pad(factors, (0, 0, 0, missing[1] // BLOCK, 0, missing[0]))
    num_factors = weight.form.num_factors
    words = _nibble_words(codes) if weight.form.is_nibbles else (codes + offset).view(torch.int32)
    words = words.view(parts, rows // panel, panel, pairs, -1)
    num_words = words.shape[-1]
    memory = allocate(4 * parts * rows * pairs * (num_factors + num_words))
    # [panels, parts, pairs, factors and words of a pair's columns]
    whole = memory.view(torch.int32).view(rows // panel, parts, pairs, (num_factors + num_words) * panel)
    front, behind = whole.split((num_factors * panel, num_words * panel), -1)
    front.view(torch.float16).unflatten(-1, (num_factors, 2, panel)).copy_(
        factors.view(parts, rows // panel, panel, pairs, 2, num_factors).permute(1, 0, 3, 5, 4, 2)
    )
    behind.unflatten(-1, (num_words, panel)).copy_(words.permute(1, 0, 3, 4, 2))
    return whole, in_features


def _nibble_words(codes: torch.Tensor) -> torch.Tensor:
    """[…, n] codes of four bits as [… , n / 8] int32: the first four of eight lie in the lower halves of its bytes."""
    eights = codes.unflatten(-1, (-1, 2, 4))
    return (eights[..., 0, :] | eights[..., 1, :] << 4).contiguous().view(torch.int32).flatten(-2)


def _to_panels(stored: torch.Tensor, panel: int, multiple: int, *, parts: int) -> tuple[torch.Tensor, int]:
    """Panels as weight.h lays them out, and the number of inputs rounded up to `multiple`."""
    group = 4 // stored.itemsize
    columns, in_features = stored.shape[0] // parts, stored.shape[1]
    padded = _round_up(columns, panel), _round_up(in_features, multiple)
    memory = allocate(parts * padded[0] * padded[1] * stored.itemsize)
    # [parts, panels, panel, words, group] of the weight become [panels, parts, words, panel, group] in memory.
    panels = memory.view(stored.dtype).view(padded[0] // panel, parts, padded[1] // group, panel, group)
    source = stored.reshape(parts, columns, in_features)
    if padded != (columns, in_features):
        source = torch.nn.functional.pad(source, (0, padded[1] - in_features, 0, padded[0] - columns))
    panels.copy_(source.view(parts, -1, panel, padded[1] // group, group).permute(1, 0, 3, 2, 4))
    return panels, padded[1]


def _in_smallest_form(weight: torch.Tensor) -> torch.Tensor:
    narrow = weight.bfloat16()
    return narrow if weight.dtype == torch.bfloat16 or torch.equal(narrow.float(), weight) else weight.contiguous()


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
