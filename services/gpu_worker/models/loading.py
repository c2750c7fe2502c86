"""From a model folder to a model on a device."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kernels.linear.api import has_native_bfloat16
from services.gpu_worker.models.config import ModelConfig, parse_config
from services.gpu_worker.models.llama import LlamaModel
from services.gpu_worker.models.weights import open_weights
from shared.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: str,
    on_progress: Callable[[float], None] | None = None,
) -> LlamaModel:
    """Load the model of a Transformers folder (config.json and safetensors).

    Args:
        folder: a local folder.
        dtype: `auto` (as stored), `float32`, `bfloat16` or `float16`. See `compute_dtype` for what CPUs make of it.
        device: `cpu`, `cuda` or `cuda:<index>`.
        on_progress: is told the share of the work that is done, 0 to 1.

    Raises:
        ConfigError: an unknown architecture, unsupported variant, unknown dtype or device, missing or damaged weights.
    """
    config = load_config(folder)
    stored, place = stored_dtype(config, dtype), _device(device)
    computed = compute_dtype(stored, place)
    with open_weights(folder, dtype=computed, rounded_to=stored, device=place) as weights, torch.inference_mode():
        return LlamaModel(config, weights, dtype=computed, device=place, on_progress=on_progress)


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json` and `generation_config.json`.

    Raises:
        ConfigError: the first is missing, one is not JSON, or the model is not supported.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json")
    generation = folder / "generation_config.json"
    return parse_config(_read_json(folder / "config.json"), _read_json(generation) if generation.is_file() else {})


def stored_dtype(config: ModelConfig, dtype: str) -> torch.dtype:
    """The dtype to which weights are rounded.

    Raises:
        ConfigError: `dtype` is none of the known names.
    """
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r}: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations and KV cache.

    A CPU without instructions for a 16-bit format multiplies it 3 to 8 times slower than float32 (2 cores, AVX-512,
    oneDNN: 40 against 240 GFLOP/s at 32 rows). There the weights keep their 16-bit values, but are held and multiplied
    as float32.
    """
    if device.type != "cpu" or (stored == torch.bfloat16 and has_native_bfloat16()):
        return stored
    return torch.float32


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} is not available: {error}") from error
    return device


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content
