"""Tensors of a model folder: safetensors, in one file or sharded by an index. Never pickle. GGUF: gguf_weights.py."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from kernels.linear.api import Weight
from shared.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Weights(Protocol):
    """Tensors by the names that Transformers gives them."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether `projection` may answer what `get` does not: a weight in its quantized form."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`.

        Raises:
            ConfigError: it is missing or has another shape.
        """

    def joined(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Several tensors one below the other: the bias of a fused projection."""

    def projection(self, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> Weight:
        """The weight of a fused projection, as it will be multiplied."""


def prefix_of(weights: Weights, name: str, prefixes: Sequence[str]) -> str:
    """The first of `prefixes` under which there is a tensor `name`; the first of all if there is none."""
    return next((prefix for prefix in prefixes if prefix + name in weights), prefixes[0])


class WeightReader:
    """Reads tensors by name, rounds them to one dtype and gives them in another (wider or equal) on one device."""

    def __init__(
        self, files: dict[str, "safe_open"], *, dtype: torch.dtype, rounded_to: torch.dtype, device: torch.device
    ) -> None:
        self._files = files
        self._dtype = dtype
        self._rounded_to = rounded_to
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._files

    keeps_blocks = False

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._files:
            raise ConfigError(f"the weights have no tensor {name!r}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the configuration says {shape}")
        return tensor.to(device=self._device, dtype=self._rounded_to).to(self._dtype)

    def joined(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        return torch.cat([self.get(name, shape) for name, shape in zip(names, shapes, strict=True)])

    projection = joined


@contextmanager
def open_weights(
    folder: Path, *, dtype: torch.dtype, rounded_to: torch.dtype, device: torch.device
) -> Iterator[WeightReader]:
    """Open the weights of a folder.

    Raises:
        ConfigError: there are none, or a file is damaged.
    """
    with ExitStack() as stack:
        files: dict[str, safe_open] = {}
        for path in _weight_files(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: {error}") from error
            files.update(dict.fromkeys(opened.keys(), opened))
        yield WeightReader(files, dtype=dtype, rounded_to=rounded_to, device=device)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        unnamed = sorted(folder.glob("*.safetensors"))
        if len(unnamed) != 1:
            raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX} nor exactly one other safetensors file")
        return unnamed
    names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigError(f"{folder / INDEX} names files outside its folder: {outside}")
    return [folder / name for name in names]
