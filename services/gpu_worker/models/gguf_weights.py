"""Tensors of a GGUF file under the names and in the order of Transformers, weights of products in their stored blocks.

What has a kernel (kernels/linear/blocks.py) keeps its codes and scales; plain numbers stay plain; every other quantized
type is dequantized and rounded to Q8_0.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch

from kernels.linear.api import Weight
from kernels.linear.blocks import BlockForm, BlockWeight, parse_blocks, round_to_q8_0, stack
from services.gpu_worker.models.config import DecoderConfig
from shared.errors import ConfigError
from shared.model_store import gguf_files

log = logging.getLogger(__name__)

_PLAIN = ("F64", "F32", "F16", "BF16")
_SUFFIXES = (".weight", ".bias")


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How a file differs from a Transformers folder."""

    pairs_rotate: bool = False
    """Query and key heads hold the two dimensions of a rotation side by side, not half a head apart."""


_ARCHITECTURES = {
    "llama": _Architecture(pairs_rotate=True),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(),
    "phi3": _Architecture(),
    "gemma2": _Architecture(),
    "gemma3": _Architecture(),
}


class GgufReader:
    """`Weights` of one open file."""

    keeps_blocks = True

    def __init__(self, file: gguf.GGUFReader, config: DecoderConfig, dtype: torch.dtype) -> None:
        """`dtype`: of the tensors that are no blocks.

        Raises:
            ConfigError: an architecture whose tensors are not known.
        """
        name = _architecture_name(file)
        if name not in _ARCHITECTURES:
            raise ConfigError(f"quantization gguf: not for architecture {name!r}, only {', '.join(_ARCHITECTURES)}")
        self._architecture = _ARCHITECTURES[name]
        kind = next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
        self._names = gguf.get_tensor_name_map(kind, config.num_layers)
        self._tensors = {tensor.name: tensor for tensor in file.tensors}
        self._config = config
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._tensors

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._find(name, shape)
        numbers = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type))).view(shape)
        order = self._order(name, shape[0])
        return self._as_transformers(name, numbers if order is None else numbers[order]).to(self._dtype)

    def joined(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        return torch.cat([self.get(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def projection(self, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> Weight:
        """If the parts are not stored alike, all of them become Q8_0."""
        parts = [self._weight(name, shape) for name, shape in zip(names, shapes, strict=True)]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if len(tensors) == len(parts):
            return torch.cat(tensors)
        blocks = [part for part in parts if isinstance(part, BlockWeight)]
        if len(blocks) == len(parts) and len({block.form for block in blocks}) == 1:
            return stack(blocks)
        return stack([round_to_q8_0(part) for part in parts])

    def _weight(self, name: str, shape: tuple[int, int]) -> Weight:
        tensor = self._find(name, shape)
        kind = tensor.tensor_type.name
        if kind not in BlockForm.__members__:
            numbers = self.get(name, shape)
            return numbers if kind in _PLAIN else round_to_q8_0(numbers)
        weight = parse_blocks(BlockForm[kind], torch.from_numpy(np.array(tensor.data)).view(shape[0], -1))
        order = self._order(name, shape[0])
        return weight if order is None else weight.rows(order)

    def _stored_name(self, name: str) -> str | None:
        found: str | None = self._names.get_name(name, try_suffixes=_SUFFIXES)
        return found

    def _find(self, name: str, shape: tuple[int, ...]) -> gguf.ReaderTensor:
        tensor = self._tensors.get(self._stored_name(name) or "")
        if tensor is None:
            raise ConfigError(f"the GGUF file has no tensor for {name!r}")
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise ConfigError(f"tensor {tensor.name!r} has shape {found}, the configuration says {shape}")
        return tensor

    def _order(self, name: str, outputs: int) -> torch.Tensor | None:
        """Places in the file of the output features of `name`; None: the same ones."""
        config = self._config
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if heads is None or not self._architecture.pairs_rotate:
            return None
        return torch.arange(outputs).view(heads, outputs // heads // 2, 2).transpose(1, 2).flatten()

    def _as_transformers(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """Files hold a norm's weight as it is applied."""
        is_norm = numbers.dim() == 1 and name.endswith("norm.weight")
        return numbers - 1 if is_norm and self._config.norm_plus_one else numbers


def gguf_file(folder: Path) -> Path:
    """The GGUF file in a model folder.

    Raises:
        ConfigError: there is none, or more than one.
    """
    found = gguf_files(folder)
    if len(found) != 1:
        have = f"{len(found)} .gguf files" if found else "no .gguf file"
        raise ConfigError(f"quantization gguf: {folder} has {have}; `pagewire pull --gguf MODEL` puts one there")
    return found[0]


@contextmanager
def open_gguf(path: Path, config: DecoderConfig, dtype: torch.dtype) -> Iterator[GgufReader]:
    """Open the weights of a GGUF file.

    Raises:
        ConfigError: it is damaged, or of an architecture whose tensors are not known.
    """
    try:
        file = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{path}: {error}") from error
    kinds = Counter(tensor.tensor_type.name for tensor in file.tensors if len(tensor.shape) > 1)
    rounded = {kind: count for kind, count in kinds.items() if kind not in (*BlockForm.__members__, *_PLAIN)}
    log.info("%s: matrices of %s; rounded to Q8_0: %s", path.name, dict(kinds), rounded or "none")
    try:
        yield GgufReader(file, config, dtype)
    except NotImplementedError as error:  # of a type that the library cannot dequantize
        raise ConfigError(f"{path}: {error}") from error


def _architecture_name(file: gguf.GGUFReader) -> str:
    field = file.get_field("general.architecture")
    return "" if field is None else str(field.contents())
