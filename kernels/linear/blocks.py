"""Weights as GGUF files hold them: BLOCK numbers of an output feature share a float16 scale, and in Q4_1 a minimum."""

from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from kernels.checks import require

BLOCK = 32
_SCALE_BYTES = 2
_LARGEST_CODE = 127


class BlockForm(StrEnum):
    """As GGUF calls them: `code * scale`, in Q4_0 `(code - 8) * scale`, in Q4_1 `code * scale + minimum`."""

    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"

    @property
    def is_nibbles(self) -> bool:
        """Whether two codes share a byte."""
        return self is not BlockForm.Q8_0

    @property
    def num_factors(self) -> int:
        """float16 numbers of a block beside its codes."""
        return 2 if self is BlockForm.Q4_1 else 1

    @property
    def bytes_per_block(self) -> int:
        return _SCALE_BYTES * self.num_factors + (BLOCK // 2 if self.is_nibbles else BLOCK)


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight [out_features, in_features]; in_features is a multiple of BLOCK."""

    form: BlockForm
    codes: torch.Tensor
    """[out_features, in_features] int8: -128 to 127, or 0 to 15."""
    factors: torch.Tensor
    """[out_features, in_features / BLOCK, form.num_factors] float16: scale, then minimum."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantized(self) -> torch.Tensor:
        """[out_features, in_features] float32. Exact but for Q4_1, whose sums are rounded once."""
        codes = self.codes.unflatten(1, (-1, BLOCK)).float() - (8 if self.form is BlockForm.Q4_0 else 0)
        scales = self.factors.float()
        numbers = codes * scales[..., :1]
        return (numbers + scales[..., 1:] if self.form is BlockForm.Q4_1 else numbers).flatten(1)

    def rows(self, order: torch.Tensor) -> "BlockWeight":
        """The output features `order` [n] int64 of it, in that order."""
        return replace(self, codes=self.codes[order], factors=self.factors[order])


def parse_blocks(form: BlockForm, raw: torch.Tensor) -> BlockWeight:
    """A weight from its bytes in a GGUF file.

    Args:
        raw: [out_features, bytes of a row] uint8.

    Raises:
        ValueError: no whole number of blocks.
    """
    size = form.bytes_per_block
    require(raw.dim() == 2 and raw.shape[1] % size == 0, f"parse_blocks: {tuple(raw.shape)} bytes of {form}")
    blocks = raw.unflatten(1, (-1, size))
    head = _SCALE_BYTES * form.num_factors
    factors = blocks[..., :head].contiguous().view(torch.float16)
    stored = blocks[..., head:]
    codes = torch.cat((stored & 15, stored >> 4), -1) if form.is_nibbles else stored
    return BlockWeight(form, codes.flatten(1).contiguous().view(torch.int8), factors)


def round_to_q8_0(weight: torch.Tensor | BlockWeight) -> BlockWeight:
    """The nearest weight in Q8_0, whose steps are a 127th of a block's largest number; Q8_0 and Q4_0 lose nothing."""
    if isinstance(weight, BlockWeight):
        if weight.form is BlockForm.Q8_0:
            return weight
        if weight.form is BlockForm.Q4_0:
            return BlockWeight(BlockForm.Q8_0, weight.codes - 8, weight.factors)
        weight = weight.dequantized()
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / _LARGEST_CODE).half()
    codes = torch.where(scales == 0, 0, blocks / scales.float()).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    return BlockWeight(BlockForm.Q8_0, codes.flatten(1).to(torch.int8), scales)


def stack(parts: list[BlockWeight]) -> BlockWeight:
    """Weights of one form and width, one below the other.

    Raises:
        ValueError: their forms differ.
    """
    require(len({part.form for part in parts}) == 1, f"stack: forms {[str(part.form) for part in parts]}")
    joined = torch.cat([part.codes for part in parts]), torch.cat([part.factors for part in parts])
    return BlockWeight(parts[0].form, *joined)
